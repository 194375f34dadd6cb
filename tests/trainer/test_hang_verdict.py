"""Which collective a rank waits for, from the entries of torch's flight recorder."""

import json
import time

import pytest

from trainer.faults import hang_report
from trainer.faults.hang_report import FlightRecorder, is_pending


def test_a_collective_is_pending_until_it_or_a_later_one_completes() -> None:
    status = {"0": {"last_completed_collective": "7"}}

    def entry(
        number: int, *, retired: bool = False, group: int = 0, backend: str = "nccl"
    ) -> dict[str, object]:
        return {
            "profiling_name": f"{backend}:all_reduce",
            "collective_seq_id": number,
            "pg_id": group,
            "retired": retired,
            "is_p2p": False,
        }

    assert is_pending(entry(8), status)
    assert not is_pending(entry(8, retired=True), status)
    assert not is_pending(
        entry(7), status
    )  # NCCL never retires the parts of a coalesced collective
    # The first of a group without completed collectives
    assert is_pending(entry(1, group=1), status)
    # gloo counts point-to-point messages in the status, too.
    assert is_pending(entry(7, backend="gloo"), status)
    assert not is_pending(entry(8, backend="gloo", retired=True), status)


@pytest.mark.parametrize("retired", [True, False])
def test_a_count_of_gloo_that_stays_behind_is_not_a_hang(
    retired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In about one of 3,000 broadcasts, torch's count of completed collectives stays one behind."""
    entry = {
        "profiling_name": "gloo:broadcast",
        "collective_seq_id": 6,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "time_created_ns": 1,
        "retired": retired,
        "is_p2p": False,
    }
    counts = {"last_enqueued_collective": "6", "last_completed_collective": "5"}
    content = json.dumps({"pg_status": {"0": counts}, "entries": [entry]})
    monkeypatch.setattr(hang_report, "_DUMPS", [lambda entries, traces: content])
    clock = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    recorder = FlightRecorder()
    for _ in range(4):
        recorder.poll()
    assert recorder.waited_seconds == (None if retired else 3.0)
    assert recorder.name == "broadcast #6"
