"""The figures of README.md, docs/heads.md and docs/data.md, drawn by code.

`python -m docs.figures` from the repository draws them all into docs/.
"""
