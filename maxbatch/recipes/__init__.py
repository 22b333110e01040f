"""One file for each kind of sample: what it knows on every floor, from its records to its loss."""
