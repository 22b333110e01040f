"""`maxbatch fit`: the largest batch that fits, as the compiler says."""
