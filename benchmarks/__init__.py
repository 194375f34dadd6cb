"""Benchmarks that print ratios of contenders: run `python -m benchmarks.NAME` in the repository."""
