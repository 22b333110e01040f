"""Files and objects: one interface to disks and object stores, atomic writes, locks."""
