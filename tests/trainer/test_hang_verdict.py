"""The one-line description of a hang, derived from the states of all ranks."""

from trainer.faults.hang_report import RankState, describe_hang, is_pending


def test_many_locations_are_shortened() -> None:
    """tests/trainer/test_watchdog.py covers the description of a few ranks."""
    states = {
        rank: RankState(5, rank, "data", "data.reader:9", "all_reduce #120", None)
        for rank in range(1, 100)
    }
    states[0] = RankState(5, 8, "head", "heads.collectives:40", "all_gather #121", 10)
    before = {rank: RankState(0, 0, "", "", "", None) for rank in states}
    line = describe_hang(before, states, size=100)
    assert "; 92 more groups of ranks; rank 0: waiting in" in line
    assert len(line) < 800


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
