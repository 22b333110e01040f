"""`maxbatch import`: configs of other programs as ours."""
