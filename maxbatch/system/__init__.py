"""What every room stands on: errors, the terminal, processes, locks, files, storage, the table of chips."""
