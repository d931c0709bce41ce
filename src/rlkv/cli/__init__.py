"""The command line: one file per command; torch loads inside commands only."""
