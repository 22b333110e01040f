"""What `maxbatch import` is made of: a table for each program whose configs become ours."""
