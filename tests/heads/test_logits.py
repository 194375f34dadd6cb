"""Logit maps match their float64 definitions.

test_sharded.py tests every map with every loss and all class weights on several ranks.
"""

import math
from collections.abc import Callable
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from heads import ArcFace, ClassHead, Cosine, Dot, FactoredHead, FusedSGD, LabelSets, LabelTree
from heads.append import append_classes
from heads.config import HeadConfig
from heads.logit_maps import AnyLogitMap, ClassRows, LogitMap, log_prior, unit_vectors
from heads.losses import BinaryCrossEntropy, CrossEntropy
from tests.heads.cases import (
    LOGIT_MAPS,
    LOSS_KINDS,
    NAIVE,
    WEIGHTINGS,
    facts,
    gradient_of_nodes,
    label_tree,
    make_loss,
    naive_rows,
    problem,
    set_nodes,
    sgd,
)

EXACT = {"rtol": 1e-10, "atol": 1e-10}
DIM, ROWS = 5, 11


def psi(phi: Tensor) -> Tensor:
    """Eq. 7 of SphereFace."""
    k = torch.floor(phi / math.pi).detach()
    return (-1.0) ** k * torch.cos(phi) - 2 * k


def definition(
    logits: LogitMap, x: Tensor, rows: Tensor, bias: Tensor, true: Tensor, s: Tensor, o: Tensor
) -> Tensor:
    """The training logits [B, K], with labels [B] or a mask `true` [B, K] of the labels."""
    if logits.kind == "dot":
        z = s * x @ rows.T + bias
    else:
        cosine = (x / x.norm(dim=1)[:, None]) @ (rows / rows.norm(dim=1)[:, None]).T
        if true.ndim == 1:
            true = torch.nn.functional.one_hot(true, len(rows)).bool()
        theta = torch.acos(torch.where(true, cosine, 0))
        with_margin = psi(logits.m1 * theta + logits.m2) - logits.m3
        z = s * torch.where(true, with_margin, cosine)
    counts = counts_of(len(rows))
    return z + o + logits.prior * torch.log((counts + 1) / (counts.sum() + len(rows)))


def counts_of(num_classes: int) -> Tensor:
    return facts(num_classes).counts


@cache
def expected(name: str, kind: str, tree: LabelTree, num_rows: int = ROWS) -> list[np.ndarray]:
    """The loss and its gradients, as in `loss_and_gradients_of`."""
    labels = problem(tree, num_rows, DIM)[1]
    return loss_and_gradients_of(name, tree, num_rows, labels, lambda z: NAIVE[kind](z, labels))


def loss_and_gradients_of(
    name: str, tree: LabelTree, num_rows: int, true: Tensor, loss_of: Callable[[Tensor], Tensor]
) -> list[np.ndarray]:
    """A loss of the training logits and its gradients with respect to features, nodes, log scale
    and offset. `true` are labels or a mask of labels."""
    logits = LOGIT_MAPS[name]
    features, _, nodes = problem(tree, num_rows, DIM)
    features, nodes = features.requires_grad_(), nodes.requires_grad_()
    log_scale = torch.tensor(math.log(logits.scale), dtype=torch.float64, requires_grad=True)
    offset = torch.tensor(logits.offset, dtype=torch.float64, requires_grad=True)
    rows = naive_rows(tree, nodes)
    z = definition(logits, features, rows[:, :DIM], rows[:, DIM], true, log_scale.exp(), offset)
    loss = loss_of(z)
    leaves = [features, nodes, log_scale, offset]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    by_nodes = grads[1] if logits.kind == "dot" else grads[1][:, :DIM]
    found = [loss.detach(), grads[0], by_nodes]
    return [each.numpy() for each in [*found, *(grads[2:] if logits.learn_scale else ())]]


def make_head(name: str, kind: str, weighting: str, num_classes: int, mesh=None) -> ClassHead:
    return ClassHead(
        DIM,
        label_tree(weighting, num_classes),
        make_loss(kind, num_classes),
        logits=LOGIT_MAPS[name],
        class_counts=counts_of(num_classes),
        mesh=mesh,
        dtype=torch.float64,
    )


def step(
    head: ClassHead, features: Tensor, labels: Tensor | LabelSets, **options: Any
) -> list[np.ndarray]:
    mine = features.clone().requires_grad_()
    loss = head(mine, labels, **options)
    loss.backward()
    found = [loss.detach(), mine.grad, gradient_of_nodes(head)]
    if head.log_scale is not None:
        found += [head.log_scale.grad, head.offset.grad]
    return [each.numpy() for each in found]


@pytest.mark.parametrize("name", LOGIT_MAPS)
def test_loss_and_gradients_equal_the_definition(name):
    for kind, weighting in zip(LOSS_KINDS, cycle(WEIGHTINGS)):
        # With 150 classes, the logits of the first 64 are saved until backward.
        num_classes = 150 if kind == "ce" else 13
        head = make_head(name, kind, weighting, num_classes)
        object.__setattr__(head.engine, "memory_bytes", 30_000)
        features, labels, nodes = problem(head.tree, ROWS, DIM)
        set_nodes(head, nodes)
        found = step(head, features, labels)
        for got, want in zip(found, expected(name, kind, head.tree), strict=True):
            np.testing.assert_allclose(got, want, **EXACT, err_msg=f"{kind} {weighting}")


@pytest.mark.parametrize("name", LOGIT_MAPS)
def test_evaluation_and_the_stored_map_apply_neither_margin_nor_prior(name):
    head = make_head(name, "ce", "vtree", 13).eval()
    features, labels, nodes = problem(head.tree, ROWS, DIM)
    set_nodes(head, nodes)
    if head.log_scale is not None:
        head.log_scale.data.fill_(0.4)
        head.offset.data.fill_(-0.1)
    found = head.evaluated_map()
    stored = TypeAdapter(AnyLogitMap).validate_json(found.model_dump_json())
    rows = naive_rows(head.tree, nodes)
    plain = Dot() if name == "dot" else Cosine()
    scalars = [torch.tensor(each, dtype=torch.float64) for each in (found.scale, found.offset)]
    z = definition(plain, features, rows[:, :DIM], rows[:, DIM], labels, *scalars)
    np.testing.assert_allclose(head(features, labels).detach(), NAIVE["ce"](z, labels), **EXACT)
    for block, scored in zip(head.class_rows(4), head.score_blocks(features, 4), strict=True):
        np.testing.assert_allclose(scored.scores, z[:, block.class_ids], **EXACT)
        np.testing.assert_allclose(stored(features, block), scored.scores, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["dot", "cosine"])
def test_the_logits_of_a_gallery_match_the_map(name):
    logits = LOGIT_MAPS[name].evaluated(scale=3.0, offset=0.2)
    features = torch.randn(50, DIM)
    features[7] = 0
    bias = None if logits.normalizes else torch.randn(1)
    row = ClassRows(torch.zeros(1), torch.randn(1, DIM), bias)
    found = logits.of_one_class(features.numpy(), row)
    torch.testing.assert_close(torch.from_numpy(found), logits(features, row)[:, 0])


ANGLES = torch.linspace(0, math.pi, 1000, dtype=torch.float64)
EPS = torch.finfo(torch.float64).eps


@pytest.mark.parametrize("name", ["sphereface", "arcface", "cosine"])
def test_the_true_logit_decreases_with_the_angle_beyond_pi_and_its_gradient_is_finite(name):
    cosines = torch.cos(ANGLES).requires_grad_()
    found = LOGIT_MAPS[name].with_margin(cosines, EPS)
    assert (found.diff() < 1e-12).all()
    assert found[-1] < -1.1  # lower than any cosine
    found.sum().backward()
    assert cosines.grad.isfinite().all()
    assert (cosines.grad >= 0).all()


def test_a_cosine_outside_the_clamp_has_the_value_and_gradient_of_the_bound():
    cosines = torch.tensor([1 + 1e-6, 1.0, 1 - 1e-4, -1 - 1e-6], requires_grad=True)
    values = ArcFace().with_margin(cosines, 1e-4)
    values.sum().backward()
    assert values[0] == values[1] == values[2]
    assert cosines.grad[0] == cosines.grad[1] == cosines.grad[2] > 0
    assert cosines.grad[3].isfinite()


def test_a_zero_vector_has_a_cosine_of_zero_and_a_zero_gradient():
    vectors = torch.tensor([[0.0, 0.0], [3.0, 4.0], [1e-30, 0.0]], requires_grad=True)
    units = unit_vectors(vectors)
    units.sum().backward()
    torch.testing.assert_close(units.detach(), torch.tensor([[0.0, 0.0], [0.6, 0.8], [0.0, 0.0]]))
    assert (vectors.grad[[0, 2]] == 0).all()
    assert (vectors.grad[1] != 0).all()


@pytest.mark.parametrize("learned", ["scale", "offset"])
def test_a_scale_or_an_offset_that_is_learned_alone_is_evaluated(learned):
    head = ClassHead(DIM, 4, CrossEntropy(), logits=Dot(**{f"learn_{learned}": True}))
    with torch.no_grad():
        for parameter in (head.log_scale, head.offset):
            if parameter is not None:
                parameter.fill_(0.5)
    stored = head.evaluated_map()
    want = (math.exp(0.5), 0.0) if learned == "scale" else (1.0, 0.5)
    assert (stored.scale, stored.offset) == pytest.approx(want)


def test_the_prior_is_the_logarithm_of_smoothed_frequencies():
    torch.testing.assert_close(
        log_prior(2.0, torch.tensor([0, 3, 7])).exp(),
        (torch.tensor([1, 4, 8], dtype=torch.float64) / 13) ** 2,
    )


def test_a_prior_requires_counts_of_every_class_and_does_not_support_appending():
    with pytest.raises(ValueError, match="pass class_counts"):
        ClassHead(DIM, 13, CrossEntropy(), logits=Dot(prior=1.0))
    with pytest.raises(ValueError, match=r"class_counts of shape \[12\]"):
        ClassHead(DIM, 13, CrossEntropy(), logits=Dot(prior=1.0), class_counts=torch.ones(12))
    head = ClassHead(DIM, 13, CrossEntropy(), logits=Dot(prior=1.0), class_counts=torch.ones(13))
    with pytest.raises(ValueError, match="prior for 13 classes, but none for new classes"):
        append_classes(head, [-1])


def test_presets_have_default_margins_that_can_be_combined():
    config = HeadConfig.model_validate({"logits": {"kind": "arcface", "m3": 0.1}})
    assert (config.logits.m1, config.logits.m2, config.logits.m3) == (1.0, 0.5, 0.1)
    assert not config.bias
    assert HeadConfig().bias
    assert HeadConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weights": {"kind": "factored"}, "loss": {"kind": "quadratic"}},
            "factored supports only",
        ),
        (
            {"weights": {"kind": "vtree"}, "loss": {"kind": "hierarchical_softmax"}},
            "hierarchical_softmax supports only dot",
        ),
        ({"bias": True}, "arcface logits do not support a bias"),
    ],
)
def test_unsupported_combinations_with_a_logit_map_raise_an_error(changes, message):
    with pytest.raises(ValidationError, match=message):
        HeadConfig.model_validate({"logits": {"kind": "arcface"}, **changes})


def test_a_factored_head_has_no_bias_by_default():
    options = {"weights": {"kind": "factored"}, "loss": {"kind": "quadratic"}}
    assert not HeadConfig.model_validate(options).bias
    head = FactoredHead(DIM, 13, make_loss("quadratic", 13))
    assert head.bias is None


class HalvedMargin(LogitMap):
    normalizes = True

    @property
    def has_margin(self) -> bool:
        return True

    def with_margin(self, cosine: Tensor, eps: float) -> Tensor:
        return (3 * cosine - 1) / 2


def test_a_user_s_map_changes_the_true_logit_in_training_and_is_a_cosine_in_evaluation():
    config = HeadConfig(logits=HalvedMargin(scale=3))
    assert not config.bias
    assert config.model_dump()["logits"]["kind"] == f"{__name__}:HalvedMargin"
    head = ClassHead(DIM, 13, CrossEntropy(), logits=config.logits, dtype=torch.float64)
    features, labels, _ = problem(head.tree, ROWS, DIM)
    cosine = unit_vectors(features) @ unit_vectors(head.weight.detach()).T
    true = torch.nn.functional.one_hot(labels, 13).bool()
    z = 3 * torch.where(true, (3 * cosine - 1) / 2, cosine)
    expectation = torch.nn.functional.cross_entropy(z, labels)
    torch.testing.assert_close(head(features, labels).detach(), expectation)
    assert head.evaluated_map() == Cosine(scale=3)
    scores = torch.cat([block.scores for block in head.score_blocks(features)], dim=1)
    torch.testing.assert_close(scores, 3 * cosine)


@pytest.mark.parametrize("name", ["__call__", "evaluated", "normalized"])
def test_a_logit_map_that_overrides_what_training_does_not_call_is_rejected(name):
    with pytest.raises(TypeError, match=f"overrides {name}"):
        type("Mine", (Dot,), {name: lambda *_: None, "__module__": __name__})


def test_an_invalid_logit_map_is_the_only_error_of_a_head():
    with pytest.raises(ValidationError) as caught:
        HeadConfig.model_validate({"logits": {"kind": "mine:Map"}})
    assert [error["loc"] for error in caught.value.errors()] == [("logits",)]


@pytest.mark.parametrize(
    ("loss", "logits", "fuses"),
    [
        (CrossEntropy(), ArcFace(learn_scale=True), False),
        (CrossEntropy(), Dot(learn_scale=True), True),
        (
            BinaryCrossEntropy(),
            Cosine(scale=10, offset=-10, learn_scale=True, learn_offset=True),
            False,
        ),
    ],
    ids=["arcface", "dot", "bce"],
)
def test_a_learned_scale_and_offset_stay_in_range_under_sgd(loss, logits, fuses):
    num_classes, lr = 200, 0.2
    torch.manual_seed(0)
    centers = torch.randn(num_classes, 16)
    backbone = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU())
    head = ClassHead(32, num_classes, loss, logits=logits)
    of_backbone = torch.optim.SGD(backbone.parameters(), lr=lr, momentum=0.9)
    of_head = FusedSGD(head, lr=lr) if fuses else sgd(head, lr, momentum=0.9)
    for _ in range(60):
        labels = torch.randint(num_classes, (64,))
        inputs = centers[labels] + 0.3 * torch.randn(64, 16)
        for optimizer in (of_backbone, of_head):
            optimizer.zero_grad()
        head(backbone(inputs), labels).backward()
        for optimizer in (of_backbone, of_head):
            optimizer.step()
    learned = head.evaluated_map()
    assert logits.scale / 10 < learned.scale < 10 * logits.scale
    assert abs(learned.offset - logits.offset) < 1
