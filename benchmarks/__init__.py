"""Benchmarks: `python -m benchmarks` compares measurements with bars, prints a table and writes
JSON.
"""
