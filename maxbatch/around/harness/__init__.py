"""lm-evaluation-harness: its tasks, its model interface, and the scores of a run's model at
evals.
"""
