"""Measurements: run one with `python -m benchmarks.NAME`; its last line of output is JSON."""
