"""The factored head matches a plain head trained with SGD at every step, including when sharded."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from heads import ClassHead
from heads.append import append_classes
from heads.factored import FactoredHead
from heads.losses import CrossEntropy
from tests.heads.cases import make_loss, share
from tests.ranks import rank_mesh, run_on_ranks

DIM, CLASSES, LR, DECAY = 6, 40, 0.1, 0.02
KINDS = ("quadratic", "ccql", "taylor_softmax", "spherical_softmax", "spherical_bound")
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def make_factored(kind: str, num_classes: int = CLASSES, **options) -> FactoredHead:
    options = {"init_std": 0.3, "dtype": torch.float64, **options}
    return FactoredHead(DIM, num_classes, make_loss(kind, num_classes), **options)


def make_plain(kind: str, num_classes: int = CLASSES, **options) -> ClassHead:
    options = {"init_std": 0.3, "dtype": torch.float64, "bias": False, **options}
    return ClassHead(DIM, num_classes, make_loss(kind, num_classes), **options)


def batches(count: int, rows: int = 9, num_classes: int = CLASSES):
    """Features [rows, DIM] with a dominant direction, and labels that repeat within a batch."""
    generator = torch.Generator().manual_seed(count + rows)
    for _ in range(count):
        features = torch.randn(rows, DIM, generator=generator, dtype=torch.float64)
        features[:, 0] += 1.5
        yield features, torch.randint(min(7, num_classes), (rows,), generator=generator)


def pass_through(head: ClassHead, features: Tensor, labels: Tensor, scale: float = 1.0):
    """Return the loss and the scaled gradient of the features. The head records its own
    gradient."""
    features = features.clone().requires_grad_()
    loss = head(features, labels)
    (loss * scale).backward()
    return loss.detach().numpy(), features.grad.numpy()


def current_rows(head: FactoredHead) -> np.ndarray:
    """The current W, without the consolidation caused by reading `weight`."""
    return head._rows(head._held()).numpy().copy()


def assert_equal_to_sgd(kind: str, parts: int = 1, scale: float = 1.0, **options) -> FactoredHead:
    most = options.pop("max_singular_value", 10.0)
    ours = make_factored(kind, max_singular_value=most, **options)
    plain = make_plain(kind, **options)
    sgd = torch.optim.SGD([plain.weight], lr=LR, weight_decay=DECAY)
    for group in zip(*[batches(30 * parts)] * parts, strict=True):
        for features, labels in group:
            got = pass_through(ours, features, labels, scale)
            for mine, theirs in zip(got, pass_through(plain, features, labels, scale), strict=True):
                np.testing.assert_allclose(mine, theirs, **EXACT)
        norm = plain.weight.grad.square().sum()
        np.testing.assert_allclose(ours.squared_gradient_norm(), norm, **EXACT)
        ours.step(LR, DECAY)
        sgd.step()
        sgd.zero_grad()
        np.testing.assert_allclose(current_rows(ours), plain.weight.detach(), **EXACT)
    return ours


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_equals_sgd_with_class_weights_loss_scaling_and_two_backward_passes(kind):
    weights = torch.linspace(0, 2, CLASSES)
    assert_equal_to_sgd(kind, parts=2, scale=0.3, class_weights=weights)


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_equals_sgd_if_some_steps_consolidate(kind):
    most = {"taylor_softmax": 1.02, "spherical_softmax": 1.05, "spherical_bound": 1.1}
    head = assert_equal_to_sgd(kind, max_singular_value=most.get(kind, 1.5))
    assert 2 < head.num_consolidations < 28
    assert head.weight.grad is None


def test_scaling_the_gradients_equals_scaling_the_loss():
    ours, other = make_factored("taylor_softmax"), make_factored("taylor_softmax")
    for features, labels in batches(4):
        pass_through(ours, features, labels)
        norm = ours.squared_gradient_norm()
        ours.scale_gradients(0.5)
        np.testing.assert_allclose(ours.squared_gradient_norm(), norm / 4)
        # Later gradients are not scaled.
        pass_through(ours, features, labels)
        pass_through(other, features, labels, 1.5)
        ours.step(LR)
        other.step(LR)
        np.testing.assert_allclose(current_rows(ours), current_rows(other), **EXACT)


def test_a_step_without_a_gradient_changes_nothing():
    head = make_factored("quadratic")
    (features, labels), *_ = batches(1)
    before = current_rows(head)
    head.step(LR, DECAY)
    pass_through(head, features, labels)
    head.zero_grad()
    assert head.squared_gradient_norm() == 0
    head.step(LR, DECAY)
    with torch.no_grad():
        head(features, labels)
    head.step(LR, DECAY)
    np.testing.assert_array_equal(current_rows(head), before)


def test_computing_only_the_gradient_of_the_features_records_nothing():
    head = make_factored("quadratic")
    (features, labels), *_ = batches(1)
    features.requires_grad_()
    (alone,) = torch.autograd.grad(head(features, labels), features)
    assert head.squared_gradient_norm() == 0
    np.testing.assert_array_equal(alone, pass_through(head, features.detach(), labels)[1])
    assert head.squared_gradient_norm() > 0


def test_reading_the_weight_or_its_rows_returns_plain_rows():
    readers = {
        "weight": lambda head: head.weight,
        "state_dict": lambda head: head.state_dict()["weight"],
        "within a model": lambda head: torch.nn.Sequential(head).state_dict()["0.weight"],
        "class_rows": lambda head: torch.cat([b.rows for b in head.class_rows(7)]),
        "score_blocks": lambda head: (
            torch.cat(
                [b.scores for b in head.score_blocks(torch.eye(DIM, dtype=torch.float64), 7)], dim=1
            ).T
        ),
        "deepcopy": lambda head: copy.deepcopy(head).weight,
        "float32": lambda head: head.float().weight,
    }
    for name, read in readers.items():
        head = make_factored("quadratic")
        for features, labels in batches(3):
            pass_through(head, features, labels)
            head.step(LR, DECAY)
        assert head._factors is not None
        want = current_rows(head)
        tolerance = 1e-6 if name == "float32" else 1e-12
        np.testing.assert_allclose(read(head).detach(), want, atol=tolerance, err_msg=name)


def test_a_resumed_head_stays_bitwise_equal_to_the_head_that_was_saved():
    ours = make_factored("spherical_softmax", dtype=torch.float32)
    resumed = make_factored("spherical_softmax", dtype=torch.float32, seed=1)
    for features, labels in batches(20):
        pass_through(ours, features, labels)
        ours.step(LR, DECAY)
    pass_through(resumed, features, labels)
    resumed.step(LR, DECAY)
    resumed.load_state_dict(ours.state_dict())
    for features, labels in batches(10):
        mine, theirs = (pass_through(head, features, labels) for head in (ours, resumed))
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(a, b)
        ours.step(LR, DECAY)
        resumed.step(LR, DECAY)
    assert ours._factors is not None
    np.testing.assert_array_equal(current_rows(ours), current_rows(resumed))


def test_an_external_change_to_the_weight_is_detected():
    ours, plain = make_factored("quadratic"), make_plain("quadratic", seed=1)
    for features, labels in batches(3):
        pass_through(ours, features, labels)
        ours.step(LR)
    with torch.no_grad():
        ours.weight.copy_(plain.weight)
    got = pass_through(ours, features, labels)
    for mine, theirs in zip(got, pass_through(plain, features, labels), strict=True):
        np.testing.assert_allclose(mine, theirs, **EXACT)


def test_changing_the_weight_while_steps_are_pending_raises_an_error():
    head = make_factored("quadratic")
    stale, steps = head.weight, batches(3)
    features, labels = next(steps)
    pass_through(head, features, labels)
    with torch.no_grad():
        stale[3] += 1
    with pytest.raises(ValueError, match=r"read head\.weight again"):
        head.step(LR)
    head.zero_grad()
    pass_through(head, features, labels)
    head.step(LR)
    with torch.no_grad():
        stale[3] += 1
    for use in (lambda: head(features, labels), lambda: head.weight, head.consolidate):
        with pytest.raises(ValueError, match=r"read head\.weight again"):
            use()


def test_backward_through_a_graph_built_before_a_step_raises_an_error():
    head = make_factored("quadratic")
    (features, labels), *_ = batches(1)
    early, late = head(features, labels), head(features, labels)
    late.backward()
    _ = head.weight
    head.step(LR)
    with pytest.raises(RuntimeError, match="took a step between"):
        early.backward()


def test_bfloat16_features_autocast_and_compile_give_the_results_of_float64():
    ours, exact = (make_factored("taylor_softmax", dtype=d) for d in (torch.float32, torch.float64))
    compiled = torch.compile(ours, backend="eager")
    for features, labels in batches(5):
        features = features.bfloat16()
        leaf = features.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(leaf, labels)
        loss.backward()
        want_loss, want = pass_through(exact, features.double(), labels)
        assert loss.dtype == torch.float32
        np.testing.assert_allclose(loss.detach(), want_loss, rtol=1e-6)
        assert leaf.grad.dtype == torch.bfloat16
        np.testing.assert_allclose(leaf.grad.double(), want, rtol=1e-2, atol=1e-6)
        ours.step(LR, DECAY)
        exact.step(LR, DECAY)
    np.testing.assert_allclose(current_rows(ours), current_rows(exact), atol=1e-6)


def test_statistics_of_bfloat16_weights_do_not_drift_from_the_rows():
    head = make_factored("quadratic", dtype=torch.bfloat16)
    for features, labels in batches(50):
        pass_through(head, features, labels)
        head.step(LR, DECAY)
    rows, moments = torch.from_numpy(current_rows(head)), head._current_moments()
    np.testing.assert_allclose(moments.gram, rows.T @ rows, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(moments.total, rows.sum(0), rtol=1e-9, atol=1e-9)


def test_appended_classes_are_trained_and_only_roots_can_be_appended():
    head = make_factored("quadratic")
    for features, labels in batches(3):
        pass_through(head, features, labels)
        head.step(LR)
    append_classes(head, [-1, -1])
    plain = make_plain("quadratic", CLASSES + 2)
    with torch.no_grad():
        plain.weight.copy_(head.weight)
    labels[0] = CLASSES + 1
    got = pass_through(head, features, labels)
    for mine, theirs in zip(got, pass_through(plain, features, labels), strict=True):
        np.testing.assert_allclose(mine, theirs, **EXACT)
    with pytest.raises(ValueError, match="pass -1 for each class"):
        append_classes(head, [0])
    assert head.num_classes == CLASSES + 2


def test_unsupported_losses_and_invalid_bounds_are_rejected():
    with pytest.raises(ValueError, match=r"does not support ce.*one of the losses quadratic, ccql"):
        FactoredHead(DIM, CLASSES, CrossEntropy())
    with pytest.raises(ValueError, match=r"max_singular_value is 0\.5"):
        make_factored("quadratic", max_singular_value=0.5)


def test_non_finite_features_raise_an_error_that_names_their_rows():
    head = make_factored("quadratic")
    (features, labels), *_ = batches(1)
    features[2, 1] = torch.nan
    with pytest.raises(FloatingPointError, match="1 of 9 rows of features"):
        head(features, labels)


# ---- sharded ----

# Two losses: the statistics of only one of them include the sum of the logits.
SHARDED_KINDS = ("ccql", "taylor_softmax")
SHARDED = [
    (3, 13, 1, 11),
    (4, 5, 1, 11),  # chunks of 2: the last rank has no classes
    (4, 13, 2, 3),  # two class groups of two, and some ranks without rows
    (4, 13, 4, 11),  # every rank holds all classes
]


def sharded_run(num_classes: int, data_axis: int, rows: int):
    """For each loss and step: the loss, this rank's feature gradients, the norm and the rows."""
    mesh, mine = rank_mesh(data_axis), share(rows)
    return {
        kind: steps_of(make_factored(kind, num_classes, **sharded_options(mesh)), rows, mine)
        for kind in SHARDED_KINDS
    }


def sharded_options(mesh):
    return {"mesh": mesh, "max_singular_value": 1.3}


def steps_of(head: FactoredHead, rows: int, mine: slice):
    answers = []
    for step, (features, labels) in enumerate(batches(8, rows, head.num_classes)):
        got = [pass_through(head, features[mine], labels[mine]) for _ in range(1 + step % 2)]
        norm = head.squared_gradient_norm().numpy()
        head.scale_gradients(0.5)
        head.step(LR, DECAY)
        if step == 5 and head.engine.weights.start == 0:
            _ = head.weight  # on only some ranks
        answers.append((*got[-1], norm, current_rows(head)))
    weights = head.engine.weights
    return answers, (weights.start, weights.stop), head.num_consolidations


@pytest.mark.parametrize(("world_size", "num_classes", "data_axis", "rows"), SHARDED)
def test_a_sharded_factored_head_equals_an_unsharded_one(world_size, num_classes, data_axis, rows):
    ranks = run_on_ranks(world_size, sharded_run, num_classes, data_axis, rows)
    edges = [rows * rank // world_size for rank in range(world_size + 1)]
    for kind in SHARDED_KINDS:
        alone = make_factored(kind, num_classes, **sharded_options(None))
        want, _, _ = steps_of(alone, rows, slice(None))
        for (begin, end), answers in zip(pairwise(edges), ranks, strict=True):
            got, (start, stop), _ = answers[kind]
            for (loss, by_features, norm, w), mine in zip(want, got, strict=True):
                np.testing.assert_allclose(mine[0], loss, **EXACT)
                np.testing.assert_allclose(mine[1], by_features[begin:end], **EXACT)
                np.testing.assert_allclose(mine[2], norm, **EXACT)
                np.testing.assert_allclose(mine[3], w[start:stop], **EXACT)
    assert ranks[0]["ccql"][2] > 2


def change_the_weight_of_one_rank():
    head = make_factored("quadratic", mesh=rank_mesh())
    stale = head.weight
    (features, labels), *_ = batches(1)
    pass_through(head, features, labels)
    head.step(LR)
    if dist.get_rank() == 1:
        with torch.no_grad():
            stale[0] += 1
    with pytest.raises(ValueError, match=r"read head\.weight again"):
        head(features, labels)
    return "raised"


def test_an_invalid_change_on_one_rank_raises_an_error_on_all_ranks():
    assert run_on_ranks(2, change_the_weight_of_one_rank) == ["raised"] * 2
