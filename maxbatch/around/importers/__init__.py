"""`maxbatch import`: a table for each program whose configs become ours."""
