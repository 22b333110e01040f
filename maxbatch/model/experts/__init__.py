"""Experts: the router that chooses some of them for each token, their grouped products, the sums of
their balance.
"""
