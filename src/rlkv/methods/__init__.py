"""One file, one method: a way to hold the KV cache.

The file name is the name on the command line; the first docstring line is its description.
"""
