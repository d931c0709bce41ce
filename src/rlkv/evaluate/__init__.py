"""Evaluation: run a task under a method, keep records, make reports."""
