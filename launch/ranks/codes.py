"""Which of the ranks' exit codes is the run's, what it means to a person, and what a new try mends.

Codes are as subprocess gives them: a rank that a signal ended is minus the signal's number.
"""

import signal
from collections.abc import Iterable

from trainer.process.exit_codes import BAD_INPUT, DONE, INTERRUPTED, KILLED, PREEMPTED

# Before a rank can note them these end it: nothing is trained yet, so it is preempted all the same.
_PREEMPTING = (-signal.SIGTERM, -signal.SIGUSR1, -signal.SIGHUP)
_NOT_MENDED = (BAD_INPUT, PREEMPTED, INTERRUPTED)


def code_that_counts(codes: Iterable[int]) -> int:
    """Of all ranks' codes the one that tells most: a rank whose peer ends fails too, with 1."""
    found = [_meaning(code) for code in codes if code != DONE]
    killed = [code for code in found if code > KILLED and code != INTERRUPTED]
    if killed:
        return killed[0]
    for code in (BAD_INPUT, PREEMPTED, INTERRUPTED):
        if code in found:
            return code
    return max(found, default=DONE)


def _meaning(code: int) -> int:
    if code in _PREEMPTING:
        return PREEMPTED
    return KILLED - code if code < 0 else code


def codes_of_their_own(codes: dict[int, int]) -> dict[int, int]:
    """Those of the ranks that were not ended by SIGTERM because another one had ended; by rank."""
    own = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM}
    return own or codes


def is_mended_by_another_try(code: int) -> bool:
    return code not in (DONE, *_NOT_MENDED)


def reason(codes: dict[int, int]) -> str | None:
    """A line on a rank that could not say itself why it ended; global rank -> code."""
    for rank, code in codes.items():
        if code < 0 and code not in _PREEMPTING:
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            return f"rank {rank} was ended by {signal.Signals(-code).name}{hint}"
    return None
