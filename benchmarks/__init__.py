"""Benchmarks that compare contenders. Run `python -m benchmarks.NAME` from the repository root."""
