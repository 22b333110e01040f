"""Compilation for devices that are elsewhere, and the compiler's own clock."""
