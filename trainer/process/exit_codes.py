"""Exit codes of a rank and of `kway`; docs/cluster.md contains the table of errors.

The exit code of a rank that was killed by a signal is 128 + the signal number, as in a shell.
"""

from data.retry import is_transient

DONE = 0
FAILED = 1
BAD_INPUT = 2
PREEMPTED = 75  # EX_TEMPFAIL in sysexits.h: the user should run the same command again
INTERRUPTED = 130
KILLED = 128


def code_of(error: ValueError | OSError) -> int:
    """Return FAILED for a transient error, which may not recur, or BAD_INPUT for any other
    error.
    """
    return FAILED if is_transient(error) else BAD_INPUT
