"""Benchmarks that print ratios of contenders. Run `python -m benchmarks.NAME` in the repository."""
