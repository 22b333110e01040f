"""One folder per kind of sample: its behaviour on every floor, from records to loss."""
