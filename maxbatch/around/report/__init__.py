"""`maxbatch report`: one page for one or more runs, and for sweeps."""
