"""The files that runs leave. No JAX."""
