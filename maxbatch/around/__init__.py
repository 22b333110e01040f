"""What stands beside the trainer: other formats, other programs, and what looks at runs."""
