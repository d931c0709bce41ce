"""Benchmarks as commands: side by side in one run, medians, measured bytes."""
