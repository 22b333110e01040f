"""Text: rows of tokens, each predicted from the previous ones."""
