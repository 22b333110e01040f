"""The export of a model or of its adapters as a Hugging Face folder."""
