"""Lines, tables and bars on a terminal."""
