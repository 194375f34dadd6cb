"""Determines which I/O errors are transient, and retries operations that fail with one of them.

This module does not import torch, because the launcher and `trainer/process/exit_codes.py` use it
before torch is imported.
"""

import errno
import logging
import random
import time
from collections.abc import Callable
from threading import main_thread
from typing import TypeVar

Answer = TypeVar("Answer")

_log = logging.getLogger("kway.data")

# Errors from which a disk, a network file system or a server can recover. Other errors (a full
# disk, a missing file, insufficient permissions) recur until their cause is fixed.
TRANSIENT_ERRNOS = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EAGAIN,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENOTCONN,
        errno.EPIPE,
        errno.EREMOTEIO,
    }
)

# With the waits below, all attempts together take at most about 25 s. This is well below
# `train.timeout_seconds`, after which collectives on the other ranks fail.
ATTEMPTS = 8
_FIRST_SECONDS = 0.2
_LONGEST_SECONDS = 20.0
DEFAULT_REMEDY = "check the disk, the file server and the network, then run the same command again"


class TransientError(OSError):
    """A failure that may not recur when the operation is retried."""


class RetriesExhaustedError(TransientError):
    """All attempts failed. The exception is raised from the last error."""


def is_transient(error: BaseException | None) -> bool:
    """Return whether `error`, or an error from which it was raised, is transient."""
    while error is not None:
        if isinstance(error, TransientError | TimeoutError | ConnectionError):
            return True
        if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
            return True
        error = error.__cause__
    return False


def retried(what: str, operation: Callable[[], Answer]) -> Answer:
    """Call `operation`, which must be safe to repeat, until it succeeds. Return its result.

    what: the name of the file in log lines and in the error. Raises RetriesExhaustedError after the
    last attempt. An error that is not transient is raised immediately.
    """
    attempt = 1
    while True:
        try:
            return operation()
        except OSError as error:
            wait_before_retry(what, error, attempt)
        attempt += 1


def wait_before_retry(
    what: str,
    error: OSError,
    attempt: int,
    *,
    attempts: int = ATTEMPTS,
    remedy: str = DEFAULT_REMEDY,
) -> None:
    """Log the error of `attempt` (from 1) and wait, with exponential backoff and jitter.

    Raises `error` itself if it is not transient or was already retried. Raises
    RetriesExhaustedError after the last of `attempts`.
    """
    if isinstance(error, RetriesExhaustedError) or not is_transient(error):
        raise error
    longest = min(_FIRST_SECONDS * 2 ** (attempt - 1), _LONGEST_SECONDS)
    wait = longest * random.SystemRandom().uniform(0.5, 1)
    # Do not retry in a process that is exiting, because it closes the connections of its background
    # threads.
    if attempt >= attempts or not main_thread().is_alive():
        raise RetriesExhaustedError(f"{what}: {error} ({attempt} attempts): {remedy}") from error
    _log.warning("%s: %s; attempt %d of %d in %.1f s", what, error, attempt + 1, attempts, wait)
    time.sleep(wait)
