"""Python's garbage collector at rest while very many objects are made, none of them garbage.

It looks again and again at all that is there: a manifest of 1,000,000 classes takes several times
as long with it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_gc() -> Iterator[None]:
    """Off in the block, or in a function that it decorates; then as it was, also after an error."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
