"""Text to token ids, and conversations to text by a chat template."""
