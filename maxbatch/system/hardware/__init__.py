"""Chips, simulated devices, host memory and the versions of software."""
