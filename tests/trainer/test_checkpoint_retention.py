"""Checkpoint retention for arbitrary lists of steps and results."""

import math

from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoints.commit import Retention, StoredCheckpoint, superseded

VALUES = st.none() | st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, 0.5])
STORED = st.dictionaries(st.integers(0, 60), VALUES, max_size=12).map(
    lambda found: [StoredCheckpoint(step, value) for step, value in found.items()]
)
RETENTIONS = st.builds(
    Retention,
    last=st.integers(1, 5),
    every_steps=st.none() | st.integers(1, 20),
    mode=st.sampled_from([None, "max", "min"]),
)


@given(STORED, RETENTIONS)
def test_the_newest_the_best_and_the_multiples_of_keep_every_are_kept(stored, retention):
    deleted = superseded(stored, retention)
    steps = sorted(entry.step for entry in stored)
    assert deleted <= set(steps)
    assert not deleted & set(steps[-retention.last :])
    if retention.every_steps is not None:
        assert all(step % retention.every_steps for step in deleted)
    measured = [entry for entry in stored if entry.best is not None and math.isfinite(entry.best)]
    if retention.mode is not None and measured:
        choose = max if retention.mode == "max" else min
        value = choose(entry.best for entry in measured)
        assert any(entry.best == value and entry.step not in deleted for entry in measured)


@given(STORED, RETENTIONS, st.none() | st.floats(0, 1))
def test_deleting_after_each_step_keeps_the_same_checkpoints_as_deleting_once(
    stored, retention, value
):
    """This is why a restarted run, which finds only the remaining checkpoints, keeps the right
    ones.
    """
    left: list[StoredCheckpoint] = []
    for entry in sorted(stored, key=lambda entry: entry.step):
        left.append(entry)
        deleted = superseded(left, retention)
        left = [entry for entry in left if entry.step not in deleted]
    at_once = superseded(stored, retention)
    assert {entry.step for entry in left} == {entry.step for entry in stored} - at_once
