"""A record of the results that must stay the same while code is removed.

`python -m tests.baseline` computes the record again and compares it with `recorded/`, which was
written at commit e13505ec. Each line of `accepted.txt` explains differences that are intended.
"""
