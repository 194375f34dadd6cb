"""Options that change how a step is computed do not change its losses and weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import run_on_ranks
from tests.trainer.training import (
    assert_equal_results,
    clip_gradients,
    each,
    images,
    share,
    started,
    take_steps,
    trained,
)
from trainer.config import EmaConfig
from trainer.ema import MovingAverage
from trainer.loss_scale import LossScale
from trainer.step import compute_gradients

# torch's own compiler still triggers these warnings.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not:UserWarning"),
]


def with_option(option: str, strategy: str) -> dict[str, Any]:
    return {"train__strategy": {"kind": strategy}, f"train__{option}": True}


OPTIONS = [
    with_option("activation_checkpointing", "ddp"),
    with_option("activation_checkpointing", "fsdp"),
    with_option("activation_checkpointing", "deepspeed"),
    with_option("channels_last", "ddp"),
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(OPTIONS, id="uncompiled"),
        pytest.param([with_option("compile", "fsdp")], id="compiled", marks=pytest.mark.slow),
    ],
)
def test_an_option_does_not_change_the_results(cases, glyphs):
    """Batch norm is synchronized. Its statistics are updated only once, even if the forward pass
    runs twice.
    """
    expected = trained(glyphs, None, {})
    arguments = [(glyphs, None, changes) for changes in cases]
    for rank in run_on_ranks(2, each, trained, arguments):
        for case, found in zip(cases, rank, strict=True):
            assert_equal_results(found, expected, str(case))


HALF_PRECISION = [
    {"train__precision": precision, "train__strategy": strategy}
    for precision in ("bf16", "fp16")
    for strategy in ({"kind": "fsdp"}, {"kind": "deepspeed", "stage": 3})
]
BF16_WEIGHTS = {"kind": "fsdp", "param_dtype": "bf16"}
WITH_BF16_WEIGHTS = [
    {"train__strategy": BF16_WEIGHTS},
    {"train__strategy": BF16_WEIGHTS, "train__activation_checkpointing": True},
    {"train__strategy": {**BF16_WEIGHTS, "reduce_dtype": "bf16", "shard_group": 1}},
    {"train__strategy": BF16_WEIGHTS, "backbone__batch_norm": "frozen", "train__micro_batches": 2},
]


def test_half_precision_trains_float32_weights_under_every_strategy(glyphs):
    expected = trained(glyphs, None, {})
    cases = [(glyphs, None, changes) for changes in HALF_PRECISION]
    for rank in run_on_ranks(2, each, trained, cases):
        for case, (losses, entries) in zip(HALF_PRECISION, rank, strict=True):
            np.testing.assert_allclose(losses, expected[0], rtol=3e-2, err_msg=str(case))
            assert losses != expected[0], case
            assert all(value.dtype != np.float16 for value in entries.values()), case


def test_bf16_weights_give_the_results_of_autocast_up_to_rounding(glyphs):
    """Under autocast, matrix products round their weights in the same way."""
    cases = [{"train__precision": "bf16", **case} for case in WITH_BF16_WEIGHTS]
    ranks = run_on_ranks(2, each, trained, [(glyphs, None, changes) for changes in cases])
    for number, case in enumerate(cases):
        alone = {key: value for key, value in case.items() if key != "train__strategy"}
        expected = trained(glyphs, None, alone)
        for losses, entries in (rank[number] for rank in ranks):
            np.testing.assert_allclose(losses, expected[0], rtol=1e-3, err_msg=str(case))
            for name, value in entries.items():
                assert value.dtype == expected[1][name].dtype, name
                np.testing.assert_allclose(
                    value, expected[1][name], rtol=0.02, atol=0.02, err_msg=f"{case} {name}"
                )
    for rank in ranks:
        assert rank[0][0] == rank[1][0]  # with and without activation checkpointing


def test_the_scale_does_not_change_the_gradients(glyphs):
    norms = []
    for scale in (1.0, 2.0**12):
        task = started(glyphs, train__precision="fp16")
        task.loss_scale.restore({"value": scale, "good_steps": 0})
        compute_gradients(task, share(task), step=1)
        norms.append(clip_gradients(task, 0.5))
        norms.append(clip_gradients(task, None) * scale)
    assert norms[0] > 0.5
    assert norms[2] == pytest.approx(norms[0], rel=1e-2)
    assert norms[3] == pytest.approx(norms[1], rel=1e-2)


def test_the_loss_scale_grows_after_good_steps_and_shrinks_after_an_overflow():
    scale = LossScale("fp16", torch.device("cpu"))
    finite, taken, skipped = torch.tensor(1.0), torch.tensor(False), torch.tensor(True)
    scale.restore({"value": 2.0**16, "good_steps": 1998})
    scale.update(finite, taken)
    assert scale.to_json() == {"value": 2.0**16, "good_steps": 1999}
    scale.update(torch.tensor(torch.nan), skipped)  # not an overflow
    assert scale.to_json() == {"value": 2.0**16, "good_steps": 1999}
    scale.update(finite, taken)
    assert scale.to_json() == {"value": 2.0**17, "good_steps": 0}
    for _ in range(40):
        scale.update(finite, skipped)
    assert scale.to_json() == {"value": 2.0**-14, "good_steps": 0}
    assert scale.overflows(1.0, 2.0**-13)
    assert not scale.overflows(1.0, 2.0**-14)


def test_a_moving_average_follows_its_closed_form():
    average = MovingAverage(EmaConfig(decay=0.75, warmup=False), {"w": torch.zeros(2)})
    expected = 0.0
    for step in range(1, 6):
        average.update({"w": torch.full((2,), float(step))}, step=step)
        expected = 0.75 * expected + 0.25 * step
    torch.testing.assert_close(average.averages["w"], torch.full((2,), expected))


def averaged_features(shards: Path, changes: dict[str, Any]) -> list[np.ndarray]:
    """Return the features computed with the weights, with their averages, and with the weights
    again.
    """
    task = started(shards, **changes, train__ema={"decay": 0.5, "warmup": False})
    take_steps(task, 3)
    task.eval()
    inputs = images(0, 3).inputs
    found = [task.features(inputs).numpy()]
    with task.averaged():
        found.append(task.features(inputs).numpy())
    found.append(task.features(inputs).numpy())
    losses = take_steps(task.train(), 1)
    task.strategy.close()
    return [*found, np.array(losses)]


AVERAGED = [
    {"train__strategy": strategy}
    for strategy in (
        {"kind": "ddp"},
        {"kind": "fsdp"},
        {"kind": "fsdp", "reshard_after_forward": False},
        {"kind": "deepspeed", "stage": 1},
        {"kind": "deepspeed", "stage": 3},
    )
]


def test_averages_replace_the_weights_inside_the_context(glyphs):
    expected = averaged_features(glyphs, {})
    assert np.abs(expected[0] - expected[1]).max() > 1e-3
    cases = [(glyphs, changes) for changes in AVERAGED]
    for rank in run_on_ranks(2, each, averaged_features, cases):
        for case, found in zip(AVERAGED, rank, strict=True):
            np.testing.assert_array_equal(found[2], found[0], err_msg=str(case))
            for got, want in zip(found, expected, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5, err_msg=str(case))
