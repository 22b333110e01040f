"""Parameters on disk: checkpoints, sources of parameters, Hugging Face folders, adapters as files."""
