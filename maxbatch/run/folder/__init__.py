"""The files that runs and sweeps leave, and the supervisor of child runs. No JAX."""
