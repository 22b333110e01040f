"""The ground floor: errors, terminal, processes, stop requests, locks, files, object stores, the
table of chips.
"""
