"""Class rows in bf16 and fp8: rounding, reading, training, sharding and new classes."""

from itertools import product

import numpy as np
import pytest
import torch

from heads import ClassHead, CrossEntropy, FusedSGD
from heads.append import append_classes
from heads.rows.hashing import random_bits
from heads.rows.node_values import FP8, NodeValues
from heads.rows.rounding import NUM_RANDOM_BITS, rounded, scales_of
from tests.heads.cases import LOGIT_MAPS, WEIGHTINGS, label_tree, problem, share
from tests.ranks import rank_mesh, run_on_ranks

BF16 = torch.bfloat16
# All finite numbers of e4m3.
EVERY_FP8 = torch.arange(256, dtype=torch.uint8).view(FP8).float()
EVERY_FP8 = EVERY_FP8[EVERY_FP8.isfinite()]


def bits(shape, dtype, seed=0):
    return random_bits(torch.arange(shape[0]), shape[1], NUM_RANDOM_BITS[dtype], seed=seed)


@pytest.mark.parametrize("num_bits", [16, 20])
def test_random_bits_depend_only_on_the_seed_the_row_and_the_column(num_bits):
    drawn = random_bits(torch.arange(50), 37, num_bits, seed=3)
    rows = torch.tensor([17, 4, 49])
    assert torch.equal(random_bits(rows, 37, num_bits, seed=3), drawn[rows])
    assert torch.equal(random_bits(rows, 21, num_bits, seed=3), drawn[rows, :21])
    assert (random_bits(rows, 37, num_bits, seed=4) != drawn[rows]).float().mean() > 0.99
    assert (drawn >= 0).all()
    assert (drawn < 1 << num_bits).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("first", "step"), [(1.0, 2.0**-3), (0.0, 2.0**-9)])  # subnormal if 0
@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_the_mean_over_all_random_bits_is_the_unrounded_number(dtype, first, step, sign):
    num_bits = NUM_RANDOM_BITS[dtype]
    every = torch.arange(1 << num_bits, dtype=torch.int32).expand(5, -1)
    random = torch.rand(5, generator=torch.Generator().manual_seed(0))
    values = sign * (first + 8 * step * random)  # fp8 numbers are `step` apart
    rows = values.unsqueeze(1).expand(every.shape).contiguous()
    means = rounded(rows, dtype, every).double().mean(1)
    errors = (means - values.double()) / step
    if first:
        assert not errors.any()
    # Subnormal fp8 numbers have more than 20 bits of float32 below their spacing.
    assert errors.abs().max() < 0.6 * 2**-num_bits


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_infinity_is_not_hidden(dtype):
    values = NodeValues.zeros(1, 3, dtype, torch.device("cpu"))
    values.write(slice(0, 1), torch.tensor([[1.0, torch.inf, -2.0]]), bits((1, 3), dtype))
    row = values.read(slice(0, 1)).float()[0]
    assert not row[1].isfinite()
    assert row[[0, 2]].tolist() == [1, -2]


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_numbers_of_the_type_keep_their_values(dtype):
    if dtype == FP8:
        every = EVERY_FP8
    else:
        every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(BF16).float()
        every = every[~every.isnan()]
    exact = every.expand(40, -1).contiguous()
    assert torch.equal(rounded(exact, dtype, bits(exact.shape, dtype)).float(), exact)


def test_nan_stays_nan():
    canonical = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int32).view(torch.float32)
    for dtype in (BF16, FP8):
        found = rounded(canonical.expand(100, 3).contiguous(), dtype, bits((100, 3), dtype))
        assert found.float().isnan().all()


def test_scales_are_the_smallest_powers_of_two_for_which_a_row_fits():
    rows = torch.tensor([[448.0, 1], [449, 1], [-224, 0], [3e-6, 1e-9], [0, 0], [1e30, 2]])
    scales = scales_of(rows).float()
    fits = rows.abs().amax(1) / scales
    assert scales.tolist()[:3] == [1, 2, 0.5]
    assert scales[4] == 1
    assert torch.equal(scales, torch.exp2(torch.log2(scales).round()))
    assert (fits[[0, 1, 2, 3, 5]] > 224).all()
    assert (fits <= 448).all()


def test_a_row_that_is_written_again_keeps_its_values():
    values = NodeValues.zeros(30, 17, FP8, torch.device("cpu"))
    every = slice(0, 30)
    values.write(every, torch.randn(30, 17).mul(torch.logspace(-8, 8, 30).unsqueeze(1)))
    first = values.read(every).float()
    for seed in range(20):
        values.write(every, values.read(every).float(), bits((30, 17), FP8, seed))
    assert torch.equal(values.read(every).float(), first)


def steps(dtype, weighting, logits, deferred=False, mesh=None, mine=slice(None)):
    """The rows and features' gradients after three steps, with a constant learning rate."""
    tree = label_tree(weighting, 90)
    head = ClassHead(
        6, tree, CrossEntropy(), dtype=dtype, logits=logits, mesh=mesh, init_std=0.3, seed=5
    )
    object.__setattr__(head.engine, "memory_bytes", 1)
    features, labels, _ = problem(tree, num_rows=12, dim=6)
    optimizer = FusedSGD(head, lr=0.2, deferred=deferred)
    for _ in range(3):
        leaf = features[mine].float().requires_grad_()
        head(leaf, labels[mine]).backward()
        optimizer.step()
    values = head.node_values()
    return values.read(slice(0, len(head.weight))).float().numpy(), leaf.grad.numpy()


MAPS = {name: LOGIT_MAPS[name] for name in ("normface", "arcface")} | {"dot": None}


@pytest.mark.parametrize(("weighting", "logits"), list(zip(WEIGHTINGS, MAPS.values(), strict=True)))
@pytest.mark.parametrize(("dtype", "error"), [(BF16, 1e-2), (FP8, 0.15)], ids=["bf16", "fp8"])
def test_steps_equal_those_of_float32_rows_up_to_rounding(dtype, error, weighting, logits):
    rows, grads = steps(dtype, weighting, logits)
    exact_rows, exact_grads = steps(torch.float32, weighting, logits)
    assert not np.array_equal(rows, exact_rows)
    for got, want in ((rows, exact_rows), (grads, exact_grads)):
        assert np.sqrt(np.square(got - want).mean()) < error * np.sqrt(np.square(want).mean())


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_a_deferred_step_rounds_as_one_in_backward(dtype):
    for got, want in zip(
        steps(dtype, "vtree", None), steps(dtype, "vtree", None, deferred=True), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_every_step_draws_other_random_numbers(dtype):
    head = ClassHead(6, 20, CrossEntropy(), dtype=dtype, bias=False, init_std=0.3)
    features, labels, _ = problem(head.tree, num_rows=12, dim=6)
    optimizer = FusedSGD(head, lr=0.01)
    start, results = [tensor.clone() for tensor in head.state_dict().values()], []
    for _ in range(2):
        for tensor, value in zip(head.state_dict().values(), start, strict=True):
            tensor.copy_(value)
        head(features.float(), labels).backward()
        optimizer.step()
        results.append(head.node_values().read(slice(0, 20)).float())
    assert not torch.equal(*results)


SHARDED = list(product((BF16, FP8), ("dense", "vtree")))


def steps_on_a_rank(data_axis):
    mesh = rank_mesh(data_axis)
    return [steps(*case, None, mesh=mesh, mine=share(12))[0] for case in SHARDED]


@pytest.mark.parametrize(("world_size", "data_axis"), [(3, 1), (4, 2)])
def test_ranks_draw_the_same_random_numbers(world_size, data_axis):
    ranks = run_on_ranks(world_size, steps_on_a_rank, data_axis)[: world_size // data_axis]
    for case, *parts in zip(SHARDED, *ranks, strict=True):
        alone, _ = steps(*case, None)
        # The sums of gradients differ in their last bits, so a few numbers round differently.
        assert (np.concatenate(parts) != alone).mean() < 0.01


def test_fp8_rows_have_no_gradient():
    head = ClassHead(6, 90, CrossEntropy(), dtype=FP8)
    with pytest.raises(ValueError, match=r"create a heads\.FusedSGD"):
        head(torch.randn(3, 6), torch.tensor([0, 1, 2]))
    head.eval()
    features = torch.randn(3, 6, requires_grad=True)
    head(features, torch.tensor([0, 1, 2])).backward()
    assert features.grad is not None
    assert head.weight.grad is None


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_a_nan_loss_names_the_broken_features_and_class_rows(dtype):
    head = ClassHead(5, 8, CrossEntropy(), dtype=dtype)
    FusedSGD(head, lr=0.1)
    features, labels = torch.randn(3, 5), torch.tensor([0, 1, 2])
    features[1, 2] = torch.nan
    with pytest.raises(FloatingPointError, match=r"1 of 3 rows of features \(row 1\) and 0 of 8 "):
        head(features, labels)
    with torch.no_grad():
        head.weight[6] = torch.full((5,), torch.nan).to(dtype)
    with pytest.raises(FloatingPointError, match="0 of 3 rows of features and 1 of 8 "):
        head(torch.randn(3, 5), labels)


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_scores_and_classifier_rows_use_the_stored_values(dtype):
    head = ClassHead(6, label_tree("vtree", 90), CrossEntropy(), dtype=dtype, init_std=0.3)
    (rows,) = head.class_rows()
    assert rows.rows.dtype == torch.float32
    features = torch.randn(4, 6)
    (scores,) = head.score_blocks(features)
    torch.testing.assert_close(scores.scores, features @ rows.rows.T)
    wide = ClassHead(6, label_tree("vtree", 90), CrossEntropy(), init_std=0.3)
    (exact,) = wide.class_rows()
    assert 0 < (rows.rows - exact.rows).abs().max() < (4e-3 if dtype == BF16 else 0.07)


def test_converting_fp8_rows_to_float32_keeps_their_values():
    head = ClassHead(6, 90, CrossEntropy(), dtype=FP8, init_std=3)
    (before,) = head.class_rows()
    head.float()
    assert head.weight.dtype == torch.float32
    assert head.row_scales is None
    (after,) = head.class_rows()
    assert torch.equal(before.rows, after.rows)


def appended(dtype, data_axis=None):
    mesh = None if data_axis is None else rank_mesh(data_axis)
    head = ClassHead(6, 90, CrossEntropy(), dtype=dtype, init_std=0.3, mesh=mesh)
    append_classes(head, [-1, -1, -1], init_std=0.3)
    values = head.node_values()
    return values.read(slice(0, len(head.weight))).float().numpy()


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_new_classes_keep_the_other_rows(dtype):
    rows = appended(dtype)
    fresh = ClassHead(6, 93, CrossEntropy(), dtype=dtype, init_std=0.3).node_values()
    np.testing.assert_array_equal(rows, fresh.read(slice(0, 93)).float().numpy())
    np.testing.assert_array_equal(np.concatenate(run_on_ranks(3, appended, dtype, 1)), rows)
