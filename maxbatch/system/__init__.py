"""The ground floor: errors, the terminal, processes and their pool, stop requests, locks, files, the table of chips."""
