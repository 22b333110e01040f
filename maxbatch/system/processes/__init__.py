"""Child processes, workers, signals, and tasks on a Ray cluster."""
