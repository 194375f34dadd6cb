"""A record of what must stay the same while kway is made smaller.

`python -m tests.baseline` computes the record again and compares it with `recorded/`, which was
written at commit e13505ec, before code was removed. Each line of `accepted.txt` explains
differences.
"""
