"""Values only: no model, no I/O beyond their own file."""
