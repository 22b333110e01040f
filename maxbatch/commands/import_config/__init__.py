"""`maxbatch import`: configs of other programs in our words."""
