"""Triton, if it is installed (the extra `gpu`).

Without Triton, `jit` returns its function unchanged, so the modules that define kernels can be
imported anywhere, and the heads compute with torch operations. With `TRITON_INTERPRET=1` in the
environment before the first import, kernels run on CPU tensors, which the tests use.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

try:
    import triton
    from triton import knobs  # noqa: F401  added in Triton 3.4
    from triton import language as tl
except ImportError:
    triton = None
    # Kernels use other names of Triton's language only when they run.
    tl = SimpleNamespace(constexpr=lambda value: value)

is_installed = triton is not None
interprets = is_installed and bool(triton.knobs.runtime.interpret)


def jit(
    function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()
) -> Any:
    """Compile a function with Triton when it is first used.

    Triton compiles a kernel again if an integer argument is 1 or becomes a multiple of 16, except
    for the arguments in `do_not_specialize`.
    """
    if function is None:
        return partial(jit, do_not_specialize=do_not_specialize)
    if not is_installed:
        return function
    # The interpreter searches the globals of each function for Triton's language.
    function.__globals__.setdefault("tl", tl)
    return triton.jit(function, do_not_specialize=do_not_specialize)
