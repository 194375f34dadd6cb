"""Which collective a rank waits for, from the entries of torch's flight recorder."""

from trainer.faults.hang_report import is_pending


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
