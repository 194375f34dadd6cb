"""Triton, if it is installed (the extra `gpu`), and launches of its kernels as operators.

Without Triton, `jit` returns its function unchanged, so the modules that define kernels can be
imported anywhere, and the heads compute with torch operations. With `TRITON_INTERPRET=1` in the
environment before the first import, kernels run on CPU tensors, which the tests use.

A function that launches a kernel is an operator of torch in the namespace `kway`, so that
profilers, `TorchDispatchMode` and `FakeTensorMode` see one operation with its tensors.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

try:
    import triton
    from triton import knobs  # noqa: F401  added in Triton 3.4
    from triton import language as tl
except ImportError:
    triton = None
    # Kernels use other names of Triton's language only when they run.
    tl = SimpleNamespace(constexpr=lambda value: value)

# `torch.library.custom_op` would add 50 microseconds to each call. This library adds 4.
_LIBRARY = torch.library.Library("kway", "FRAGMENT")

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


def operator(*written: str) -> Callable[[Callable[..., None]], Any]:
    """Make a function an operator that writes to some of its arguments."""

    def define(function: Callable[..., None]) -> Any:
        name = function.__name__
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=written))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        # Fake tensors contain no data to write.
        torch.library.register_fake(f"kway::{name}", lambda *_: None, lib=_LIBRARY)
        return getattr(torch.ops.kway, name).default

    return define
