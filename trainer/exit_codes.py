"""What the exit codes of training say, of a rank and of `kway train` alike.

A rank that a signal killed is 128 + the signal's number, as in a shell.
"""

DONE = 0
FAILED = 1
BAD_INPUT = 2
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: start the same command again
INTERRUPTED = 130
KILLED = 128
