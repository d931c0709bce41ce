"""Evaluation: runs, records, what went wrong, and reports."""
