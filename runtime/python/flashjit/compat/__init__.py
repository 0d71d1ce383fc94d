"""The interfaces of other attention libraries, on flashjit: see drop_ins.md."""
