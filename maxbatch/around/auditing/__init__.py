"""An audit of any trainer: does the cut of a batch, its padding, its devices or a resume change the
update?

`trainer` calls the trainer, `data` makes its batches, `compare` measures the distance of two runs,
`promises` is the table of promises with the runs that test each, `causes` proves the cause of a
broken one, and `audit` joins them. NumPy only.
"""
