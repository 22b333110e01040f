"""An audit of anybody's trainer: does the cut of a batch, its padding, its devices or a resume change the update?

`trainer` calls the trainer, `data` makes its batches, `compare` measures how far two runs are apart, `promises` is the
table of promises with the runs that test each, `causes` proves what broke, and `audit` puts them together. NumPy alone.
"""
