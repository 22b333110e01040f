"""The config: one row per key, YAML, layers, precedence."""
