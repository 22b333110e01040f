"""The config: typed sections of keys, YAML, layers, precedence."""
