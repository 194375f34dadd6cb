"""The end of a process with the one that started it. Linux only; elsewhere nothing happens.

A launcher that is killed outright cannot end its ranks: they would train on, and write to the run
that another launcher has taken up meanwhile.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    parent: the id of the process that should be the parent. Where it is not, it died before the
    kernel knew of this wish, and this process ends here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
