"""Where a rank is: what each rank tells the others about itself, so that a hang can be named."""

import json
import sys
import threading
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from trainer.faults.recorder import Collective

_BELOW = ("torch", "deepspeed", "contextlib")


@dataclass(frozen=True)
class RankState:
    """`beat` grows while the rank lives; `waited_seconds` is the age of `pending` as seen so far.

    `place` is the line of code that the main thread is at: `module:line`.
    """

    beat: int
    step: int
    phase: str
    place: str
    newest: Collective | None
    pending: Collective | None
    waited_seconds: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "RankState":
        fields = json.loads(text)
        fields["newest"] = _collective(fields["newest"])
        fields["pending"] = _collective(fields["pending"])
        return RankState(**fields)


def _collective(fields: dict[str, Any] | None) -> Collective | None:
    return None if fields is None else Collective(**fields)


def main_thread_place() -> str:
    """The innermost line of the main thread that is not torch's or ours, as `module:line`."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None and _is_below(frame):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_globals.get('__name__', '?')}:{frame.f_lineno}"


def _is_below(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in _BELOW or module.startswith(__package__)
