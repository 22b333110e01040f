"""lm-evaluation-harness: its tasks, a model as it asks one, and the scores of a run's model at its evals."""
