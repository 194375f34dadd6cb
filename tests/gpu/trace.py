"""Host synchronizations, counted in a trace of torch's profiler.

`torch.cuda.set_sync_debug_mode` does not detect synchronizations in `torch.distributed`; a trace
contains every call of the CUDA runtime.
"""

import json
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_SPAN = "traced steps"
_CALLS = ("cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_SYNCHRONIZES = re.compile(r"cu(da)?(Device|Stream|Event|Ctx)Synchronize")
_COPIES_TO_HOST = re.compile(r"Memcpy DtoH .*Pageable")
# These operations read a value of a tensor. On a GPU, each of them synchronizes.
_READS = ("aten::_local_scalar_dense", "aten::nonzero")
_SOURCES = ("heads/", "trainer/", "data/")

Event = dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """The events inside the traced call. Times are in microseconds."""

    events: list[Event]

    def synchronizations(self) -> Counter[str]:
        """Count the calls in which the host waits for the device, by `kind at call site`.

        The kinds are the names of the CUDA calls, and `copy to the host` for copies from the device
        to pageable memory; `Tensor.item` causes both. A trace of the CPU contains no such calls, so
        the operations that would synchronize on a GPU are counted instead.
        """
        found = [(each["name"], each) for each in self._calls if self._waits(each)]
        found += [("copy to the host", self._call_of(each)) for each in self._copies]
        if not self._calls:
            found = [(each["name"], each) for each in self._of("cpu_op") if each["name"] in _READS]
        return Counter(f"{kind} at {self._site(each)}" for kind, each in found)

    @cached_property
    def _calls(self) -> list[Event]:
        return self._of(*_CALLS)

    @property
    def _copies(self) -> list[Event]:
        return [each for each in self._of("gpu_memcpy") if _COPIES_TO_HOST.match(each["name"])]

    @staticmethod
    def _waits(call: Event) -> bool:
        return bool(_SYNCHRONIZES.match(call["name"]))

    def _of(self, *categories: str) -> list[Event]:
        return [each for each in self.events if each.get("cat") in categories]

    def _call_of(self, copy: Event) -> Event:
        """Return the call that started a copy, which has the same correlation ID."""
        number = copy["args"].get("correlation")
        calls = (c for c in self._calls if c.get("args", {}).get("correlation") == number)
        return next(calls, copy)

    def _site(self, event: Event) -> str:
        """Return the innermost function of kway around an event, or the outermost operation.

        Autograd's threads may have no Python functions in the trace.
        """
        around = [each for each in self._of("python_function", "cpu_op") if _contains(each, event)]
        around.sort(key=lambda each: each["dur"])
        own = (each["name"] for each in around if each["name"].startswith(_SOURCES))
        return next(own, around[-1]["name"] if around else "an unknown function")


def traced(work: Callable[[], object], device: torch.device, *, with_stack: bool) -> Trace:
    """Call `work` under the profiler and return its trace.

    With `with_stack`, the trace contains the Python functions around each event. Recording them
    slows down the host, so do not measure idle time with this option.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        path = Path(folder) / "trace.json"
        with profile(activities=activities, with_stack=with_stack) as profiler:
            with record_function(_SPAN):
                work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # so that the trace contains all kernels
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return Trace(list(_inside(events)))


def _inside(events: list[Event]) -> Iterable[Event]:
    """Yield the events of the span, and all work on the device, which runs after its launch."""
    (span,) = [e for e in events if e.get("name") == _SPAN and e.get("cat") == "user_annotation"]
    for each in events:
        on_device = each.get("cat") in _ON_DEVICE
        if each.get("ph") == "X" and (on_device or _during(span, each)):
            yield each


def _during(span: Event, event: Event) -> bool:
    start, end = span["ts"], span["ts"] + span["dur"]
    return bool(start <= event["ts"] and event["ts"] + event["dur"] <= end)


def _contains(outer: Event, inner: Event) -> bool:
    return outer is not inner and outer.get("tid") == inner.get("tid") and _during(outer, inner)
