"""The record of a run: metrics, boards, loggers, progress, throughput, profiles."""
