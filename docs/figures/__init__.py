"""Scripts that draw the figures of README.md, docs/heads.md and docs/data.md.

`python -m docs.figures`, run in the root of the repository, writes all of them to docs/.
"""
