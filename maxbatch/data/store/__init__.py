"""From files to documents to tokens on disk."""
