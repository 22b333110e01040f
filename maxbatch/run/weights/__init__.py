"""Parameters on disk: checkpoints and other sources of parameters."""
