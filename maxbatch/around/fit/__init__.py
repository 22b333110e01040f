"""`maxbatch fit`: the largest batch that fits, according to the compiler."""
