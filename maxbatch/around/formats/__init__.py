"""The file formats of datasets: one file each, and a row in `maxbatch/registered.py`."""
