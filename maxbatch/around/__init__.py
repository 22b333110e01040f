"""Rooms around the trainer: other formats, other programs, and views of runs."""
