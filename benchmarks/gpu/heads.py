"""Measures the step of a head with many classes: time and memory compared with bare matrix
products, torch's cross-entropy and other fused losses. tests/gpu checks the results."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.timing import Row, allocated_bytes, free, peak_bytes, take_turns_on
from heads import ClassHead, FusedSGD, optional_triton
from heads.build import ROW_DTYPES
from heads.losses import CrossEntropy

_BLOCK = 1 << 16  # classes per block of the bare products

# Shape legend: B rows, K classes, d features, C classes of a block.


@dataclass(frozen=True)
class RowsSize:
    """A head whose rows FusedSGD updates: `dtype` is a value of `head.dtype`, and `batch` the
    number of feature rows."""

    dtype: str
    classes: int
    dim: int
    batch: int


@dataclass(frozen=True)
class Problem:
    """Features [B, d] in bf16, labels [B] and class weights [K, d] in float32."""

    features: Tensor
    labels: Tensor
    weights: Tensor

    @classmethod
    def random(cls, rows: int, classes: int, dim: int, device: torch.device) -> "Problem":
        torch.manual_seed(0)
        weights = torch.empty(classes, dim, device=device)
        return cls(
            torch.randn(rows, dim, device=device, dtype=torch.bfloat16),
            torch.randint(classes, (rows,), device=device),
            weights.normal_(std=dim**-0.5),
        )


# A step computes the loss and the gradients of features [B, d] and of class weights [K, d].
Step = Callable[[], None]


def head(classes: int, rows: int, dim: int, device: torch.device, seconds: float) -> Iterator[Row]:
    """Compare a step of cross-entropy with the bare products that it needs, for every contender.

    The memory does not include the features and the class weights. If a contender runs out of
    memory or a peer fails, its error is recorded. Only one contender is in memory at a time.
    """
    problem = Problem.random(rows, classes, dim, device)
    bare = _seconds(_products(problem), device, seconds)
    case = f"K = {classes:,}, B = {rows:,}, d = {dim}"
    details = f"{4 * 2 * rows * dim * classes / bare / 1e12:.3g} TFLOP/s"
    yield Row("four bare products in bf16", case, f"{1e3 * bare:.3g} ms", details=details)
    for name, create in contenders(problem):
        what = f"{name} / bare products"
        try:
            each, memory = _measured(create, device, seconds)
        except Exception as error:  # peers raise errors of any kind for sizes they do not support
            if name.startswith("kway") and not isinstance(error, torch.OutOfMemoryError):
                raise
            yield Row(what, case, details=f"{type(error).__name__}: {error}".splitlines()[0])
            continue
        details = f"{1e3 * each:.3g} ms, {memory / 1e9:.2f} GB"
        yield Row(what, case, f"{each / bare:.2f}", details=details)


def contenders(problem: Problem) -> Iterator[tuple[str, Callable[[], Step]]]:
    """Yield the losses that are installed and support the device, and functions that create their
    steps."""
    labels, is_cuda = problem.labels, problem.features.device.type == "cuda"
    step_of = partial(partial, _step_of, problem)
    yield "kway", partial(_kway, problem)
    if is_cuda and optional_triton.is_installed:
        yield "kway, tiles", partial(_kway, problem, tiles=True)
    yield "torch cross_entropy", step_of(lambda x, w: F.cross_entropy(F.linear(x, w), labels))
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13 and later
        name = "torch linear_cross_entropy"
        yield name, step_of(lambda x, w: F.linear_cross_entropy(x, w.bfloat16(), labels))
    if is_cuda and find_spec("liger_kernel") is not None:
        yield "Liger", partial(_liger, problem)
    if is_cuda and find_spec("cut_cross_entropy") is not None:
        yield "CCE, filter_eps=None", partial(_cce, problem, filter_eps=None)
        yield "CCE", partial(_cce, problem)


def fused(cases: Sequence[RowsSize], device: torch.device, seconds: float) -> Iterator[Row]:
    """Measure steps of cross-entropy in which FusedSGD updates the class rows, with tiles if
    possible. The memory includes the class rows."""
    for case in cases:
        text = f"{case.dtype} rows, K = {case.classes:,}, B = {case.batch:,}, d = {case.dim}"
        try:
            each, memory = _measured(partial(_fused, case, device), device, seconds)
        except torch.OutOfMemoryError:
            yield Row("fused step, time and memory", text, details="out of memory")
            continue
        measured = f"{1e3 * each:.3g} ms, {memory / 1e9:.2f} GB"
        flops = 4 * 2 * case.batch * case.dim * case.classes
        details = f"{flops / each / 1e12:.3g} TFLOP/s"
        yield Row("fused step, time and memory", text, measured, details=details)


def _measured(
    create: Callable[[], Step], device: torch.device, seconds: float
) -> tuple[float, int]:
    """Return the seconds of a step, and the peak memory of its creation and of a step."""
    free(device)
    before = allocated_bytes(device)
    step = create()
    step()
    memory = allocated_bytes(device) - before + peak_bytes(step, device)
    return _seconds(step, device, seconds), memory


def _seconds(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    return float(np.median(take_turns_on(device, {"step": work}, seconds=seconds)["step"]))


def _fused(case: RowsSize, device: torch.device) -> Step:
    head = ClassHead(
        case.dim,
        case.classes,
        CrossEntropy(),
        bias=False,
        dtype=ROW_DTYPES[case.dtype],
        memory_mib=512,
        tiles=device.type == "cuda" and optional_triton.is_installed,
        device=device,
    )
    features = torch.randn(case.batch, case.dim, device=device, dtype=torch.bfloat16)
    labels = torch.randint(case.classes, (case.batch,), device=device)
    return _step_of_head(head, features, labels, FusedSGD(head, lr=0.1).step)


def _kway(problem: Problem, *, tiles: bool = False) -> Step:
    classes, dim = problem.weights.shape
    head = ClassHead(dim, classes, CrossEntropy(), bias=False, init_std=0, device="meta")
    head.to_empty(device=problem.features.device)
    head.engine = replace(head.engine, tiles=tiles)
    head.weight = nn.Parameter(problem.weights)  # a copy might not fit in memory
    return _step_of_head(head, problem.features, problem.labels, head.zero_grad)


def _step_of_head(
    head: ClassHead, features: Tensor, labels: Tensor, finish: Callable[[], object]
) -> Step:
    def step() -> None:
        leaf = features.detach().requires_grad_()
        with torch.autocast(features.device.type, torch.bfloat16):
            loss = head(leaf, labels, rows_of_ranks=[len(labels)])
        loss.backward()
        finish()

    return step


def _step_of(problem: Problem, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """Return the step of a loss of features and float32 class weights under autocast."""

    def step() -> None:
        features = problem.features.detach().requires_grad_()
        weights = problem.weights.detach().requires_grad_()
        with torch.autocast(features.device.type, torch.bfloat16):
            loss = loss_of(features, weights)
        loss.backward()

    return step


def _liger(problem: Problem) -> Step:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return _step_of(problem, lambda x, w: loss(w.bfloat16(), x, problem.labels))


def _cce(problem: Problem, **options: Any) -> Step:
    from cut_cross_entropy import linear_cross_entropy

    return _step_of(
        problem, lambda x, w: linear_cross_entropy(x, w.bfloat16(), problem.labels, **options)
    )


def _products(problem: Problem) -> Callable[[], None]:
    """Return the products of a step that saves no logits: logits, logits again, and both gradients,
    in bf16, in blocks of classes."""
    features = problem.features
    rows, weights = len(features), problem.weights.bfloat16()
    by_weights = torch.empty_like(weights)
    by_features = torch.zeros_like(features)
    logits = features.new_empty(rows * min(_BLOCK, len(weights)))

    def products() -> None:
        for start in range(0, len(weights), _BLOCK):
            block = weights[start : start + _BLOCK]
            block_BC = logits[: rows * len(block)].view(rows, len(block))
            for _ in range(2):
                torch.mm(features, block.T, out=block_BC)
            by_features.addmm_(block_BC, block)
            torch.mm(block_BC.T, features, out=by_weights[start : start + _BLOCK])
            by_features.zero_()

    return products
