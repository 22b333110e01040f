"""Updates of a run, taken again elsewhere, and shown sample by sample."""
