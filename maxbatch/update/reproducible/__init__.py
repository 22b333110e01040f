"""An update that is equal to the last bit on any number of devices (`reproducible_sums`)."""
