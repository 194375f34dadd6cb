"""Checkpoint retention for arbitrary lists of steps and results."""

import math

from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoints.commit import superseded
from trainer.config import BestConfig, CheckpointConfig

VALUES = st.none() | st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, 0.5])
RESULTS = st.dictionaries(st.integers(0, 60), VALUES, max_size=12)
CONFIGS = st.builds(
    CheckpointConfig,
    keep_last=st.integers(1, 5),
    keep_best=st.none() | st.builds(BestConfig, mode=st.sampled_from(["max", "min"])),
)
EVERY = st.none() | st.integers(1, 20)


@given(RESULTS, CONFIGS, EVERY)
def test_the_newest_the_best_and_the_multiples_of_keep_every_are_kept(results, config, every):
    deleted = superseded(results, config, every)
    assert deleted <= results.keys()
    assert not deleted & set(sorted(results)[-config.keep_last :])
    if every is not None:
        assert all(step % every for step in deleted)
    measured = {
        step: result
        for step, result in results.items()
        if result is not None and math.isfinite(result)
    }
    if config.keep_best is not None and measured:
        choose = max if config.keep_best.mode == "max" else min
        value = choose(measured.values())
        assert any(measured[step] == value for step in measured.keys() - deleted)


@given(RESULTS, CONFIGS, EVERY)
def test_deleting_after_each_step_keeps_the_same_checkpoints_as_deleting_once(
    results, config, every
):
    """This is why a restarted run, which finds only the remaining checkpoints, keeps the right
    ones.
    """
    left: dict[int, float | None] = {}
    for step in sorted(results):
        left[step] = results[step]
        for deleted in superseded(left, config, every):
            del left[deleted]
    assert left.keys() == results.keys() - superseded(results, config, every)
