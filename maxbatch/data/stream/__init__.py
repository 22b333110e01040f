"""From tokens on disk to `stream[i]`."""
