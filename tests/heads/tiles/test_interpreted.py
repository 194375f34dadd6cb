"""The kernels compute the same loss and gradients as torch operations, in Triton's interpreter.

The interpreter runs the kernels on CPU tensors, with tiles of 16 rows, 32 classes and 16 features,
and divides the classes of a block among several programs. The sizes below leave a partial tile in
every dimension.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import one_hot
from torch.utils._python_dispatch import TorchDispatchMode

from heads import ClassHead, CrossEntropy, LabelSets
from heads.logit_maps import Cosine, LogitMap
from heads.losses import LOSSES, Loss
from heads.optional_triton import interprets
from heads.tiles.launch import BlockInputs
from heads.tree import LabelTree
from tests.heads.cases import LOGIT_MAPS, label_tree, make_loss
from tests.heads.set_cases import label_sets
from tests.ranks import rank_mesh, run_on_ranks

pytestmark = [
    pytest.mark.skipif(not interprets, reason="the kernels are compiled for the GPU"),
    # NumPy, with which the interpreter computes, warns of log(0) and of a row of NaN.
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]

ROWS, DIM, CLASSES = 21, 24, 100
# With this limit, blocks have the minimum of 64 classes, and the labels are in two blocks.
MEMORY_BYTES = 1 << 14
WITH_TILES = [kind for kind, loss in LOSSES.items() if loss.tile is not None]
CASES = [
    *((kind, "dense", "dot") for kind in WITH_TILES),
    *(("ce", "dense", logits) for logits in ("normface", "sphereface", "cosine")),
    ("ce", "vtree", "dot"),
    ("bce", "utree", "cosine"),
    ("batch_ce", "vtree", "arcface"),
]


def make_head(
    loss: Loss,
    *,
    tiles: bool,
    tree: LabelTree | None = None,
    logits: LogitMap | None = None,
    **options: Any,
) -> ClassHead:
    tree = tree or label_tree("dense", CLASSES)
    counts = torch.arange(1, tree.num_classes + 1)
    options = {"dim": DIM, "init_std": 0.5, "class_counts": counts} | options
    head = ClassHead(tree=tree, loss=loss, logits=logits, tiles=tiles, **options)
    head.engine = replace(head.engine, memory_bytes=MEMORY_BYTES)
    return head


def batch(num_rows: int = ROWS, dim: int = DIM, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(num_rows, dim, generator=generator)
    return features, torch.randint(CLASSES, (num_rows,), generator=generator)


def results(
    head: ClassHead, features: Tensor, labels: Tensor | LabelSets, **options: Any
) -> list[Tensor]:
    """Return the loss and the gradients of the features and of every parameter."""
    features = features.clone().requires_grad_()
    loss = head(features, labels, **options)
    loss.backward()
    return [loss.detach(), features.grad, *(each.grad for each in head.parameters())]


def assert_same(tiles: list[Tensor], torch_operations: list[Tensor], tolerance: float) -> None:
    for got, want in zip(tiles, torch_operations, strict=True):
        # Some gradients are sums of terms up to 1 in size, and 0 in exact arithmetic.
        error = (got - want).abs().max()
        assert error <= tolerance * want.abs().max() + (1e-5 if want.ndim == 0 else 3e-7)


def compare(
    loss: Loss,
    features: Tensor,
    labels: Tensor | LabelSets,
    tolerance: float = 1e-5,
    *,
    row_weights: Tensor | None = None,
    **options: Any,
) -> list[Tensor]:
    """Compare both implementations, and return the results of the kernels."""
    tiles, torch_operations = (
        results(make_head(loss, tiles=tiles, **options), features, labels, row_weights=row_weights)
        for tiles in (True, False)
    )
    assert_same(tiles, torch_operations, tolerance)
    return tiles


@pytest.mark.parametrize(("kind", "weighting", "logits"), CASES)
def test_tiles_equal_torch_operations(kind: str, weighting: str, logits: str) -> None:
    tree, loss = label_tree(weighting, CLASSES), make_loss(kind, CLASSES)
    compare(loss, *batch(), tree=tree, logits=LOGIT_MAPS[logits])


@pytest.mark.parametrize(
    ("kind", "num_rows", "dim", "num_classes"), [("bce", 1, 1, 2), ("ce", 17, 40, 65)]
)
def test_partial_tiles_of_any_size(kind: str, num_rows: int, dim: int, num_classes: int) -> None:
    loss = LOSSES[kind]()
    features, labels = batch(num_rows, dim)
    tree = LabelTree.dense(num_classes)
    compare(loss, features, labels % num_classes, tree=tree, dim=dim)


@pytest.mark.parametrize(
    ("kind", "weighting", "logits"),
    [
        ("ce", "dense", "cosine"),
        ("batch_ce", "utree", "dot"),
        ("decoupled_softmax", "dense", "dot"),
        ("decoupled_softmax", "vtree", "arcface"),
        ("bce", "vtree", "dot"),
    ],
)
def test_label_sets(kind: str, weighting: str, logits: str) -> None:
    """The first rows have labels in every tile of 32 classes; other rows have few or none."""
    features, _ = batch()
    sets = [[0, 31, 32, 40, 63, 64, 99], [*range(3, CLASSES, 7)], *label_sets(CLASSES, ROWS - 2)]
    tree, loss = label_tree(weighting, CLASSES), make_loss(kind, CLASSES)
    options = {"tree": tree, "logits": LOGIT_MAPS[logits]}
    compare(loss, features, LabelSets.of(sets), row_weights=torch.linspace(0, 2, ROWS), **options)


@pytest.mark.parametrize("kind", ["ce", "bce", "sigmoid_tanimoto"])
def test_large_logits_do_not_overflow(kind: str) -> None:
    features, labels = batch()
    compare(LOSSES[kind](), 300 * features, labels, tolerance=1e-3)


def test_the_gradient_of_the_bias_is_not_rounded() -> None:
    """It is a sum over two groups of rows, in float32. Rounding that of the true logits to bf16
    would cause errors of 1e-4."""
    features, labels = batch()
    head = make_head(CrossEntropy(), tiles=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        head(features, labels).backward()
    logits = features.bfloat16().double() @ head.weight.detach().bfloat16().double().T
    expected = (logits.softmax(1) - one_hot(labels, CLASSES)).mean(0)
    assert (head.bias.grad - expected).abs().max() < 1e-7


def test_fp16_products_of_long_class_rows_do_not_overflow() -> None:
    """The largest number in fp16 is 65,504. Cosines do not depend on the length of the rows."""
    features, labels = batch()
    with torch.autocast("cpu", dtype=torch.float16):
        options = {"logits": Cosine(scale=10), "init_std": 1e5}
        found = compare(CrossEntropy(), features, labels, 2e-3, **options)
    assert all(each.isfinite().all() and each.any() for each in found)


@pytest.mark.parametrize(("bias", "at_most"), [(False, 2), (True, 3)])
def test_a_block_of_classes_takes_few_launches(
    bias: bool, at_most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kernels and two matrix products, and with a bias, the sum of its gradient.

    The difference of two runs is that of a block. The kernels do not run."""
    launches: list[Any] = []
    monkeypatch.setattr(BlockInputs, "_launch", lambda *args, **_: launches.append(args))
    found, kernels = [], []
    for num_blocks in (3, 4):
        tree = LabelTree.dense(64 * num_blocks)
        head = make_head(CrossEntropy(), tiles=True, tree=tree, bias=bias)
        launches.clear()
        with Operations() as operations:
            results(head, *batch(), rows_of_ranks=[ROWS])
        found.append(operations.names)
        kernels.append(len(launches))
    of_block = found[1] - found[0]
    assert of_block.total() <= at_most
    assert kernels == [6, 8]
    assert sum(number for name, number in of_block.items() if "mm" in name) == 2


class Operations(TorchDispatchMode):
    """Counts the operations that launch a kernel on a GPU by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if func.namespace == "aten" and not func.is_view and "empty" not in name:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def _labels(*, of_sets: bool) -> Tensor | LabelSets:
    return LabelSets.of(label_sets(5, 8)) if of_sets else batch(num_rows=8)[1] % 5


def _results_of_rank(of_sets: bool) -> list[np.ndarray]:
    rank = dist.get_rank()
    head = make_head(CrossEntropy(), tiles=True, tree=LabelTree.dense(5), mesh=rank_mesh())
    features, _ = batch(num_rows=8)
    mine = slice(2 * rank, 2 * rank + 2)
    labels = _labels(of_sets=of_sets)
    return [each.numpy() for each in results(head, features[mine], labels[mine])]


@pytest.mark.parametrize("of_sets", [False, True], ids=["one label per row", "label sets"])
def test_ranks_with_few_classes_or_none(of_sets: bool) -> None:
    """Four ranks hold two, two, one and no class, and two rows each."""
    losses, *parts = zip(*run_on_ranks(4, _results_of_rank, of_sets), strict=True)
    features, _ = batch(num_rows=8)
    head = make_head(CrossEntropy(), tiles=False, tree=LabelTree.dense(5))
    loss, *grads = results(head, features, _labels(of_sets=of_sets))
    assert all(each == pytest.approx(loss.item(), rel=1e-5) for each in losses)
    for part, grad in zip(parts, grads, strict=True):
        np.testing.assert_allclose(np.concatenate(part), grad, rtol=1e-4, atol=1e-6)


def test_a_loss_without_a_tile_is_an_error() -> None:
    with pytest.raises(ValueError, match="simloss does not support tiles"):
        make_head(make_loss("simloss", CLASSES), tiles=True)


def test_float64_is_an_error() -> None:
    with pytest.raises(ValueError, match="float64"):
        make_head(CrossEntropy(), tiles=True, dtype=torch.float64)


def test_float64_weights_and_float32_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products are float32, and so are all floats that the kernels read."""
    launch, read = BlockInputs._launch, set()

    def recorded(block: BlockInputs, kernel: Any, tile: Any, num: int, others: Any, **more: Any):
        read.update(
            each.dtype for each in (*vars(block).values(), *others) if isinstance(each, Tensor)
        )
        launch(block, kernel, tile, num, others, **more)

    monkeypatch.setattr(BlockInputs, "_launch", recorded)
    options = {"logits": Cosine(scale=3)}
    heads = (make_head(CrossEntropy(), tiles=each, **options).double() for each in (True, False))
    assert_same(*(results(head, *batch()) for head in heads), tolerance=1e-5)
    assert read == {torch.float32, torch.int64}


def test_a_head_that_was_moved_to_an_unsupported_device_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = make_head(CrossEntropy(), tiles=True)
    monkeypatch.setattr("heads.optional_triton.interprets", False)
    with pytest.raises(ValueError, match="the head is on cpu"):
        head(*batch())
