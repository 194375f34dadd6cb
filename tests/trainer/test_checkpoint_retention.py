"""Which checkpoints stay, for all lists of steps and measures."""

import math

from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoints.commit import Retention, Stored, superseded

VALUES = st.none() | st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, 0.5])
STORED = st.dictionaries(st.integers(0, 60), VALUES, max_size=12).map(
    lambda found: [Stored(step, value) for step, value in found.items()]
)
RETENTIONS = st.builds(
    Retention,
    last=st.integers(1, 5),
    every_steps=st.none() | st.integers(1, 20),
    mode=st.sampled_from([None, "max", "min"]),
)


@given(STORED, RETENTIONS)
def test_what_goes_is_not_among_the_newest_nor_a_multiple_nor_the_best(stored, retention):
    gone = superseded(stored, retention)
    steps = sorted(one.step for one in stored)
    assert gone <= set(steps)
    assert not gone & set(steps[-retention.last :])
    if retention.every_steps is not None:
        assert all(step % retention.every_steps for step in gone)
    measured = [one for one in stored if one.best is not None and math.isfinite(one.best)]
    if retention.mode is not None and measured:
        choose = max if retention.mode == "max" else min
        value = choose(one.best for one in measured)
        assert any(one.best == value and one.step not in gone for one in measured)


@given(STORED, RETENTIONS)
def test_no_more_stays_than_was_asked_for(stored, retention):
    left = {one.step for one in stored} - superseded(stored, retention)
    if retention.every_steps is not None:
        left = {step for step in left if step % retention.every_steps}
    assert len(left) <= retention.last + (retention.mode is not None)


@given(STORED, RETENTIONS, st.none() | st.floats(0, 1))
def test_deleting_as_steps_come_keeps_what_deleting_at_once_would(stored, retention, value):
    """So a restart, which sees only what is left, knows the best and the multiples."""
    left: list[Stored] = []
    for one in sorted(stored, key=lambda one: one.step):
        left.append(one)
        gone = superseded(left, retention)
        left = [kept for kept in left if kept.step not in gone]
    at_once = superseded(stored, retention)
    assert {one.step for one in left} == {one.step for one in stored} - at_once
