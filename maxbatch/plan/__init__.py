"""The batch algebra, exact and without JAX: mesh shape, stages, micro-batches, ramp, positions,
rates.
"""
