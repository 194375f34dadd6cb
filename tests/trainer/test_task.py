"""The gradients of a step are the same for every world size, number of micro-batches and loss."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from data.loading.batch import Batch, Mixed
from tests.ranks import run_on_ranks
from tests.shards import NO_DROPOUT, TINY_BERT
from tests.trainer.training import (
    clip_gradients,
    full_entries,
    images,
    make_task,
    share,
    started,
    take_steps,
)
from trainer.step import (
    compute_gradients,
    read_numbers,
    set_rates,
    take_step,
    update_weights,
)
from trainer.task import Task
from trainer.telemetry.jsonl import log_skipped_step

SHARDED = {"head.weight", "head.bias"}


def texts(num_rows: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(50, (num_rows, 6), generator=generator)
    labels = torch.randint(13, (num_rows,), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return Batch(inputs, labels, torch.arange(num_rows), None)


def gradients(task: Task) -> dict[str, np.ndarray]:
    return {
        name: parameter.grad.numpy().copy()
        for name, parameter in task.named_parameters()
        if parameter.grad is not None
    }


def trained_weights(shards: Path, rows: int, changes: dict) -> dict[str, np.ndarray]:
    """Return the backbone weights and this rank's rows of the head after three clipped steps."""
    task = started(shards, train__global_batch=rows, **changes)
    take_steps(task, 3, rows=rows)
    return {name: tensor.numpy() for name, tensor in task.state_dict().items()}


def test_training_on_1_2_and_4_ranks_gives_the_same_weights(glyphs):
    """Batch norm is synchronized. With 3 rows on 4 ranks, one rank has no rows. test_strategies.py
    trains other losses and trees on ranks."""
    changes = {"head__loss__kind": "bce", "head__weights__kind": "utree"}
    alone = trained_weights(glyphs, 3, changes)
    for world_size in (2, 4):
        ranks = run_on_ranks(world_size, trained_weights, glyphs, 3, changes)
        for name in SHARDED:
            head = np.concatenate([result[name] for result in ranks])
            np.testing.assert_allclose(head, alone[name], rtol=1e-4, atol=2e-6)
        for result in ranks:
            for name in alone.keys() - SHARDED:
                np.testing.assert_allclose(
                    result[name], alone[name], rtol=1e-4, atol=2e-5, err_msg=name
                )


def mixed(begin: int, end: int) -> Batch:
    """Return `images` with a second class for each row. Some classes of a row have zero weight."""
    batch = images(begin, end)
    weights = torch.tensor([1.0, 0.3, 0.6, 0.0, 0.5, 0.9, 0.2, 0.7, 1.0, 0.4, 0.1])[begin:end]
    return replace(batch, mixed=Mixed((batch.labels + 3) % 13, weights))


@pytest.mark.parametrize("loss", ["ce", "bce", "smooth_topk"])
def test_a_mixed_row_contributes_to_both_of_its_classes(glyphs, loss):
    task = started(
        glyphs, head__loss__kind=loss, backbone__batch_norm="frozen", train__global_batch=4
    )
    batch = mixed(1, 5)
    value = float(compute_gradients(task.train(), batch, step=1).loss)
    got = gradients(task)
    task.zero_grad()
    features = task.backbone(batch.inputs)
    total = torch.zeros(())
    for row in range(4):
        for labels, weight in (
            (batch.labels, batch.mixed.weights[row]),
            (batch.mixed.labels, 1 - batch.mixed.weights[row]),
        ):
            total = total + weight / 4 * task.head(features[row : row + 1], labels[row : row + 1])
    total.backward()
    assert value == pytest.approx(total.item(), rel=1e-5)
    for name, gradient in gradients(task).items():
        np.testing.assert_allclose(got[name], gradient, rtol=1e-4, atol=1e-6, err_msg=name)


def accumulated(shards: Path, micro_batches: int) -> list[tuple[float, dict[str, np.ndarray]]]:
    """Return the losses and the gradients for this rank's share of 11 rows. Batch norm is frozen,
    because the statistics of a micro-batch differ from those of the batch."""
    found = []
    for loss, make in product(("ce", "batch_ce"), (images, mixed)):
        task = started(
            shards,
            head__loss__kind=loss,
            backbone__batch_norm="frozen",
            train__global_batch=11,
            train__micro_batches=micro_batches,
        )
        world = task.world
        batch = make(11 * world.rank // world.size, 11 * (world.rank + 1) // world.size)
        value = float(compute_gradients(task.train(), batch, step=1).loss)
        found.append((value, gradients(task)))
    return found


def test_accumulation_on_ranks_with_uneven_batches_equals_one_process(glyphs):
    alone = accumulated(glyphs, 1)
    for rank in run_on_ranks(2, accumulated, glyphs, 3):
        for (value, expected), (got_value, got) in zip(alone, rank, strict=True):
            assert got_value == pytest.approx(value, rel=1e-5)
            for name in expected.keys() - SHARDED:
                np.testing.assert_allclose(got[name], expected[name], rtol=1e-3, atol=1e-6)


TINY_VIT = {
    "model_type": "vit",
    "image_size": 16,
    "patch_size": 8,
    "num_channels": 1,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    **NO_DROPOUT,
}


def few_rows(
    shards: Path, config: dict, rows: int, micro_batches: int
) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss and gradients for so few rows that some ranks or micro-batches have none."""
    task = started(
        shards,
        backbone__config=config,
        train__global_batch=rows,
        train__micro_batches=micro_batches,
    )
    world = task.world
    begin, end = rows * world.rank // world.size, rows * (world.rank + 1) // world.size
    inputs = images(0, rows) if config["model_type"] == "vit" else texts(rows)
    batch = inputs.each(lambda tensor: tensor[begin:end])
    return float(compute_gradients(task.train(), batch, step=1).loss), gradients(task)


@pytest.mark.parametrize(
    ("config", "world_size", "rows", "micro_batches"),
    [(TINY_VIT, 3, 2, 1), ({**TINY_BERT, **NO_DROPOUT}, 2, 3, 2)],
    ids=["vit", "bert"],
)
def test_attention_networks_accept_ranks_and_micro_batches_without_rows(
    glyphs, config, world_size, rows, micro_batches
):
    value, expected = few_rows(glyphs, config, rows, 1)
    ranks = run_on_ranks(world_size, few_rows, glyphs, config, rows, micro_batches)
    for got_value, got in ranks:
        assert got_value == pytest.approx(value, rel=1e-5)
        for name in expected.keys() - SHARDED:
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-3, atol=1e-6)


def test_gradient_caching_repeats_the_same_dropout(glyphs):
    changes = {"backbone__config": TINY_BERT, "head__loss__kind": "batch_ce"}
    task = started(glyphs, **changes, train__global_batch=8, train__micro_batches=2).train()
    batch = texts(8)
    torch.manual_seed(5)
    parts = [{name: t[i : i + 4] for name, t in batch.inputs.items()} for i in (0, 4)]
    features = torch.cat([task.backbone(part) for part in parts])
    after = torch.get_rng_state()
    task.head(features, batch.labels).backward()
    expected = gradients(task)
    task.zero_grad()
    torch.manual_seed(5)
    compute_gradients(task, batch, step=1)
    got = gradients(task)
    assert torch.equal(torch.get_rng_state(), after)
    for name, gradient in expected.items():
        np.testing.assert_allclose(got[name], gradient, rtol=1e-4, atol=1e-6, err_msg=name)


def test_gradient_caching_updates_batch_norm_once_per_micro_batch(glyphs):
    changes = {"head__loss__kind": "batch_ce", "train__global_batch": 12, "train__micro_batches": 3}
    task = started(glyphs, **changes).train()
    compute_gradients(task, images(0, 12), step=1)
    counts = {int(b) for n, b in task.named_buffers() if n.endswith("num_batches_tracked")}
    assert counts == {3}


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_every_parameter_of_a_bert_backbone_gets_a_gradient(glyphs, pooling):
    """DDP would wait for a missing one."""
    config = {**TINY_BERT, **NO_DROPOUT}
    task = started(
        glyphs, backbone__config=config, backbone__pooling=pooling, train__global_batch=8
    )
    compute_gradients(task.train(), texts(8), step=1)
    assert all(parameter.grad is not None for parameter in task.parameters())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**TINY_BERT, "hiden_size": 4}, "hiden_size is not a known key: did you mean hidden_size"),
        ({"model_type": "resnet", "num_channels": 1, "hidden_act": "foo"}, r"backbone\.config"),
        (
            {"model_type": "resnt"},
            "is resnt, which transformers does not support: did you mean resn",
        ),
        ({"model_type": "t5"}, "t5, which is an encoder-decoder"),
    ],
)
def test_an_invalid_configuration_raises_a_one_line_error(glyphs, config, message):
    with pytest.raises(ValueError, match=message) as caught:
        make_task(glyphs, backbone__config=config)
    assert "\n" not in str(caught.value)


def test_mean_pooling_excludes_padding(glyphs):
    config = {**TINY_BERT, **NO_DROPOUT}
    task = started(glyphs, backbone__config=config, backbone__pooling="mean").eval()
    inputs = texts(2).inputs
    inputs["attention_mask"][:, 4:] = 0
    other = {**inputs, "input_ids": inputs["input_ids"].clone()}
    other["input_ids"][:, 4:] = 7
    torch.testing.assert_close(task.features(inputs), task.features(other))


def clipped(shards: Path) -> tuple[float, float]:
    task = started(shards, train__global_batch=12)
    compute_gradients(task.train(), share(task), step=1)
    return float(clip_gradients(task, 0.5)), float(clip_gradients(task, None))


def test_clipping_uses_the_norm_of_the_backbone_and_all_head_shards(glyphs):
    alone = clipped(glyphs)
    assert alone[0] > 0.5
    assert alone[1] == pytest.approx(0.5, rel=1e-4)
    for result in run_on_ranks(3, clipped, glyphs):
        assert result == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_finite_loss_with_an_infinite_gradient_changes_nothing(synchronous, glyphs):
    task = started(glyphs, train__synchronous=synchronous)
    next(task.backbone.parameters()).register_hook(lambda gradient: gradient * torch.inf)
    before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    numbers = read_numbers(task, take_step(task, images(0, 12), 1.0, step=1))
    assert np.isfinite(numbers.loss)
    assert numbers.skipped
    for name, tensor in task.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_run_may_skip_as_many_steps_as_the_limit(tmp_path):
    def skip(count: int) -> str:
        path, reason = tmp_path / "nonfinite-rank0.jsonl", "the loss is inf"
        return log_skipped_step(path, 3, images(0, 2), reason, count=count, cap=2, key_of=None)

    assert "2 of at most 2" in skip(2)
    with pytest.raises(FloatingPointError):
        skip(3)


def stepped(shards: Path, weights: str) -> tuple[dict[str, np.ndarray], list[float]]:
    """Return the model and its gradient norms after three clipped steps of SGD without momentum."""
    task = started(
        shards,
        train__global_batch=12,
        head__bias=False,
        head__weights={"kind": weights},
        head__loss={"kind": "spherical_softmax"},
        head__init_std=0.3,
        optimizer={"kind": "sgd", "lr": 0.5, "momentum": 0, "weight_decay": 0.01},
    )
    norms = []
    set_rates(task, 1.0)
    for step in range(3):
        compute_gradients(task, share(task), step=step)
        norms.append(clip_gradients(task, 1.0))
        update_weights(task, step=step)
    return full_entries(task), norms


def test_a_factored_head_trains_to_the_same_weights_as_a_dense_head(glyphs):
    dense, norms = stepped(glyphs, "dense")
    for factored, found in run_on_ranks(3, stepped, glyphs, "factored"):
        np.testing.assert_allclose(found, norms, rtol=1e-4)
        assert norms[0] > 1  # clipped
        assert factored.keys() == dense.keys()
        for name, values in factored.items():
            np.testing.assert_allclose(values, dense[name], rtol=1e-3, atol=1e-5, err_msg=name)
