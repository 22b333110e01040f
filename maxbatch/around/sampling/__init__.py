"""Text from a model: the sampler, shared by `generate`, the sample that ends a run, and
reinforcement learning.
"""
