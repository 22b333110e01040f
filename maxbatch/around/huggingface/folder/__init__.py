"""The files of a Hugging Face folder: its place on the hub, its config.json, its safetensors."""
