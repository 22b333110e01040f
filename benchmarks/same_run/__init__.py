"""Other programs' training beside what `maxbatch import` makes of their configs: the same rows, the
same start.
"""
