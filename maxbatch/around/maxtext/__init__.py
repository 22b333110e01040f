"""Checkpoints in MaxText's form (https://github.com/AI-Hypercomputer/maxtext): read as they are,
and written.
"""
