"""The private name of Ray that `data` uses. `pyproject.toml` caps Ray's version."""

import importlib
import os

_VARIABLE, _TRIES = "RAY_NUM_REDIS_GET_RETRIES", 2


def limit_tries() -> None:
    """Limit how often Ray tries to connect, unless its environment variable is set.

    By default, Ray tries for 14 minutes to connect to a server that is not a Ray cluster. It reads
    the variable when it is imported, which other modules may have done already.
    """
    if _VARIABLE in os.environ:
        return
    constants = importlib.import_module("ray._private.ray_constants")
    if not hasattr(constants, "NUM_REDIS_GET_RETRIES"):
        raise RuntimeError("this version of Ray is not supported: install Ray 2.60")
    constants.NUM_REDIS_GET_RETRIES = _TRIES  # type: ignore[attr-defined]
