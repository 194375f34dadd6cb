"""Repeats the experiments of the five papers: `python -m benchmarks.papers NAME --data DIR`.

`conduct.py` runs experiments within a budget; `experiments/` has one file an experiment, which says
what is measured and what is made of it; `page.py` writes docs/papers.md from what was measured.
"""
