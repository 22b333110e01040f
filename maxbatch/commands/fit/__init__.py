"""`maxbatch fit`: the largest batch that fits, by the compiler's word."""
