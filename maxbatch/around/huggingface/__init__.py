"""Hugging Face folders: their files without JAX, their tensors as parameters, and the export of
models and adapters.
"""
