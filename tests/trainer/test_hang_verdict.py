"""The one-line description of a hang, derived from the states of all ranks."""

from trainer.faults.hang_report import RankState, describe_hang, is_pending

_BEFORE, _GATHER, _IN_GROUP = "all_reduce #120", "all_gather #121", "all_reduce #7 of mesh_class"


def _waiting(collective: str = _GATHER, *, beat: int = 5, seconds: float = 10) -> RankState:
    return RankState(beat, 8, "head", "heads.collectives:40", collective, seconds)


def _elsewhere(*, beat: int = 5, step: int = 7, phase: str = "data") -> RankState:
    return RankState(beat, step, phase, "data.reader:9", _BEFORE, None)


def _line(**after: RankState) -> str:
    """Return the description of a hang in which rank 0 has the state `r0`, and so on. A beat of 0
    means that the rank has made no progress.
    """
    states = {int(name[1:]): state for name, state in after.items()}
    before = {rank: RankState(0, 0, "", "", "", None) for rank in states}
    return describe_hang(before, states, size=max(states) + 1)


def test_many_locations_are_shortened() -> None:
    states = {f"r{rank}": _elsewhere(step=rank) for rank in range(1, 100)}
    line = _line(r0=_waiting(), **states)
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
