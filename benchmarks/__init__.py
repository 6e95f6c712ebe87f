"""Measurements: each module is run with `python -m benchmarks.NAME` and prints JSON as its last line."""
