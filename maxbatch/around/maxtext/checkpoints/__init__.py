"""MaxText's checkpoints, read as they are: parameters, and full states that a run goes on with."""
