"""The pictures of docs/heads.md and docs/data.md, drawn from what kway's own code computes.

`python -m docs.pictures` from the repository draws them all into docs/.
"""
