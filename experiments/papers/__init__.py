"""Reproduce the experiments of the five papers: `python -m experiments.papers NAME --data DIR`.

`run_experiments.py` runs experiments within a time budget. Each file in `experiments/` defines what
one experiment measures and how it is reported. `page.py` writes docs/papers.md.
"""
