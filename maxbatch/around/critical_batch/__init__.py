"""`maxbatch critical-batch`: measures the critical batch size along a run and writes the resulting
schedule.

The branched method of Merrill et al. 2025, "Critical Batch Size Revisited",
https://arxiv.org/abs/2505.23971.
"""
