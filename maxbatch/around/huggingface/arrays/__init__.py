"""The tensors of a Hugging Face folder as sharded parameters."""
