"""The private name of Ray that `data` uses.

If a version of Ray does not have it, kway reports some wrong addresses only after 14 minutes.
"""

import importlib
import os
from contextlib import suppress

_VARIABLE, _TRIES = "RAY_NUM_REDIS_GET_RETRIES", 2


def limit_tries() -> None:
    """Limit how often Ray tries to connect, unless its environment variable is set.

    By default, Ray tries for 14 minutes to connect to a server that is not a Ray cluster. It reads
    the variable when it is imported, which other modules may have done already.
    """
    if _VARIABLE in os.environ:
        return
    with suppress(ModuleNotFoundError):
        constants = importlib.import_module("ray._private.ray_constants")
        constants.NUM_REDIS_GET_RETRIES = _TRIES  # type: ignore[attr-defined]
