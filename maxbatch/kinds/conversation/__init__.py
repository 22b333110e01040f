"""Conversations: a sample is a row of whole conversations, trained on their answers."""
