"""The programs of a run: lowered, compiled, saved, and what they need of a device."""
