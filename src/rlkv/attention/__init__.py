"""Pure torch attention functions: masks, the reference, mixed and grouped attention."""
