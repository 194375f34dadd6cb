"""Reproduce the experiments of the five papers: `python -m benchmarks.papers NAME --data DIR`.

`run_experiments.py` runs experiments within a time budget. `experiments/` has one file per
experiment, which defines what is measured and how it is reported. `page.py` writes docs/papers.md.
"""
