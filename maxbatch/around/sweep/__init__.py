"""`maxbatch sweep`: many runs of one config, each in its own process and folder."""
