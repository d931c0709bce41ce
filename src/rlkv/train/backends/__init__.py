"""Who runs units of work: this process, or workers on any number of machines."""
