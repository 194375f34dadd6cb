"""Which input/output errors are transient, and how the operation that met one is retried.

Free of torch: the launcher and the exit codes need it before torch is imported.
"""

import errno
import logging
import math
import random
import time
from collections.abc import Callable
from threading import main_thread
from typing import TypeVar

Answer = TypeVar("Answer")

_log = logging.getLogger("kway.data")

# What a disk, a network file system or a server can recover from. Everything else (a full disk, a
# missing file, no permission) fails again until a person changes something.
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

# With the waits below: 25 s at most, well under `train.timeout_seconds`, for which others wait.
ATTEMPTS = 8
_FIRST_SECONDS = 0.2
_LONGEST_SECONDS = 20.0
_REMEDY = "check the disk, the file server and the network, then run the same command again"


class TransientError(OSError):
    """A failure that another try may not meet; the message is for a person."""


class RetriesExhaustedError(TransientError):
    """It was retried often enough; raised from the last error."""


def is_transient(error: BaseException | None) -> bool:
    """Whether `error`, or what it was raised from, is transient."""
    while error is not None:
        if isinstance(error, TransientError | TimeoutError | ConnectionError):
            return True
        if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
            return True
        error = error.__cause__
    return False


def retried(what: str, operation: Callable[[], Answer]) -> Answer:
    """`operation()`, which may be called again after it failed half-way.

    `what` names the file in log lines and in the error. Raises RetriesExhaustedError after the last
    attempt, and an error that is not transient immediately.
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
    attempts: float = ATTEMPTS,
    deadline: float = math.inf,
    remedy: str = _REMEDY,
) -> None:
    """Log the error of `attempt` (counted from 1) and wait: longer each time, shortened at random.

    Raises `error` itself where it is not transient or was retried already, RetriesExhaustedError
    after the last of `attempts` or where the wait would pass `deadline` (`time.monotonic`).
    """
    if isinstance(error, RetriesExhaustedError) or not is_transient(error):
        raise error
    longest = min(_FIRST_SECONDS * 2 ** (attempt - 1), _LONGEST_SECONDS)
    wait = longest * random.SystemRandom().uniform(0.5, 1)
    # A process that ends closes the connections of its background threads.
    is_last = attempt >= attempts or time.monotonic() + wait > deadline
    if is_last or not main_thread().is_alive():
        raise RetriesExhaustedError(f"{what}: {error} ({attempt} attempts): {remedy}") from error
    of = "" if math.isinf(attempts) else f" of {attempts}"
    _log.warning("%s: %s; attempt %d%s in %.1f s", what, error, attempt + 1, of, wait)
    time.sleep(wait)
