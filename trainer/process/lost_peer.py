"""Whether an error means that another rank is gone: gloo and torch's stores say it in words."""

from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

_WORDS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Socket closed",
    "Connection refused",
    "NCCL communicator was aborted",
    "remote process exited",
)


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from or during, is about another rank's end."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        if _is_about_a_peer(found):
            return True
        seen.append(found)
        found = found.__cause__ or found.__context__
    return False


def _is_about_a_peer(error: BaseException) -> bool:
    if isinstance(error, DistNetworkError | DistStoreError | DistBackendError):
        return True
    # A data source's own connection errors are OSError, and no rank's.
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)
