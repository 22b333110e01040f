"""What runs and sweeps leave on disk, and the supervisor of child runs. No JAX."""
