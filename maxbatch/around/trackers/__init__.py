"""Experiment trackers of `log_to`: one file each, and a row in `maxbatch/registered.py`."""
