"""Models as numbers: a record per family, a row per parameter. No JAX."""
