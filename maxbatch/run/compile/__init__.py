"""The programs of a run: lowered, compiled, saved and loaded, and their memory on a device."""
