"""Limits on what clients use per replica, such as uploads, and on the inputs of a request."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from serving.api_error import RETRY, ApiError
from serving.config import ServingConfig
from trainer.bundle.spec import Reads

# JSON values in a body in addition to its inputs and classes.
MAX_VALUES = 10_000


class ClientLimit:
    """Limits `what`, such as uploads, to `most` in total and to three quarters of it per client, so
    that one client cannot block the others.

    A client is identified by `Clients.client_of` (`serving/tokens.py`).
    """

    def __init__(self, most: int, what: str, *, full: Callable[[], ApiError] | None = None) -> None:
        """`full` returns the error if the limit in total is reached; by default, it is
        `too_many_…`."""
        self._most, self._what = most, what
        message = f"the server has reached its limit of {most} {what}. Try again"
        self.per_client, self._full = -(-3 * most // 4), full or partial(self._error, message)
        self._of_clients: dict[str, int] = {}
        self.in_use = 0

    @contextmanager
    def slots(self, client: str, count: int = 1) -> Iterator[None]:
        """Acquire slots for `client` for the duration of the context."""
        self.acquire(client, count)
        try:
            yield
        finally:
            self.release(client, count)

    def acquire(self, client: str, count: int) -> None:
        """Acquire `count` slots for `client`. If fewer are free, acquires none and raises ApiError
        429."""
        of_client = self._of_clients.get(client, 0)
        if self.in_use + count > self._most:
            raise self._full()
        if of_client + count > self.per_client:
            raise self._error(
                f"you have reached your limit of {self.per_client} {self._what}. Finish or close "
                "another request first"
            )
        self._of_clients[client] = of_client + count
        self.in_use += count

    def release(self, client: str, count: int) -> None:
        """Release slots acquired with `acquire`."""
        self.in_use -= count
        left = self._of_clients.pop(client, 0) - count
        if left:
            self._of_clients[client] = left

    def _error(self, message: str) -> ApiError:
        code = f"too_many_{self._what}".replace(" ", "_")
        return ApiError(429, code, message, RETRY)


def too_busy() -> ApiError:
    message = "too many requests are waiting for the model. Try again"
    return ApiError(429, "too_busy", message, RETRY)


def body_too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes. Split the request"
    return ApiError(413, "body_too_large", message)


def max_values(limits: ServingConfig) -> int:
    """Return the maximum number of values in a body. It is high enough that a body with slightly
    too many inputs or classes is rejected with a specific error."""
    return MAX_VALUES + limits.max_inputs + limits.max_classes


def check_count(count: int, what: str, most: int) -> None:
    """Raise ApiError 413 for more than `most` images, texts or classes in a request."""
    if count > most:
        # For images, the error code is too_many_pictures.
        code = f"too_many_{'pictures' if what == 'images' else what}"
        message = f"the request has {count} {what}, but the limit is {most}. Split the request"
        raise ApiError(413, code, message)


def check_inputs(inputs: Sequence[bytes | str], reads: Reads, limits: ServingConfig) -> None:
    """Raise ApiError for no inputs, too many of them, or a text that is too long."""
    if not inputs:
        what = reads.removesuffix("s")
        raise ApiError(
            400, "no_input", f"the request does not contain any {reads}. Send at least one {what}"
        )
    check_count(len(inputs), reads, limits.max_inputs)
    most = limits.max_text_chars
    for position, one in enumerate(inputs if reads == "texts" else ()):
        if len(one) > most:
            raise ApiError(
                413,
                "text_too_long",
                f"texts[{position}] has {len(one)} characters, but the limit is {most}. Shorten "
                "the text",
            )
