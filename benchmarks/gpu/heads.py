"""Measures the step of a head with many classes: time and memory compared with bare matrix
products, torch's cross-entropy and other fused losses, and errors compared with float64."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.measuring import allocated_bytes, free, measure, peak_bytes
from benchmarks.gpu.sizes import RowsSize, Size
from heads import ClassHead, FusedSGD, optional_triton
from heads.build import ROW_DTYPES
from heads.losses import LOSSES, ClassFacts, CrossEntropy, Loss

_BLOCK = 1 << 16  # classes per block of the bare products and of the float64 reference
_CHECKED_ROWS = 64

# Shape legend: B rows, K classes, d features, C classes of a block.


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
Step = Callable[[], tuple[Tensor, Tensor, Tensor]]


def head(size: Size, device: torch.device, *, classes: int, rows: int) -> dict[str, Any]:
    """Measure a step of cross-entropy for `rows` x `classes` logits.

    The memory does not include the features and the class weights. If a contender runs out of
    memory or a peer fails, its error is recorded. Only one contender is in memory at a time.
    """
    problem = Problem.random(rows, classes, size.head_dim, device)
    reference = Reference.of(problem)
    found: dict[str, Any] = {}
    for name, create in contenders(problem):
        free(device)
        try:
            found[name] = _measured(create, problem, reference, size, device)
        except torch.OutOfMemoryError:
            found[name] = {"error": "out of memory"}
        except Exception as error:  # peers raise errors of any kind for sizes they do not support
            if name == "kway":
                raise
            found[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    free(device)
    found["bare products"] = _bare(problem, size, device)
    return {"classes": classes, "rows": rows, "dim": size.head_dim, "contenders": found}


def _measured(
    create: Callable[[Problem], Step],
    problem: Problem,
    reference: "Reference",
    size: Size,
    device: torch.device,
) -> dict[str, Any]:
    step = create(problem)
    loss, by_features, by_weights = step()
    errors = reference.errors(loss, by_features, by_weights)
    del loss, by_features, by_weights
    memory = peak_bytes(step, device)
    time = measure({"step": step}, device, seconds=size.seconds)["step"]
    return {**time, "memory_bytes": memory, "errors": errors}


def contenders(problem: Problem) -> Iterator[tuple[str, Callable[[Problem], Step]]]:
    """Yield the losses that are installed and support the device."""
    yield "kway", lambda problem: _kway(problem, CrossEntropy())
    if problem.features.device.type == "cuda" and optional_triton.is_installed:
        yield "kway, tiles", lambda problem: _kway(problem, CrossEntropy(), tiles=True)
    yield "torch cross_entropy", _cross_entropy
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13 and later
        yield "torch linear_cross_entropy", _linear_cross_entropy
    if problem.features.device.type == "cuda":
        if find_spec("liger_kernel") is not None:
            yield "Liger", _liger
        if find_spec("cut_cross_entropy") is not None:
            yield "CCE, filter_eps=None", lambda problem: _cce(problem, filter_eps=None)
            yield "CCE", _cce


def losses_with_tiles(size: Size, device: torch.device) -> dict[str, Any]:
    """Time a step of every loss that supports tiles. On a CPU, torch operations compute them."""
    tiles = device.type == "cuda" and optional_triton.is_installed
    classes, rows = size.tile_logits
    problem = Problem.random(rows, classes, size.head_dim, device)
    counts = torch.ones(classes)
    kinds = [kind for kind, loss in LOSSES.items() if loss.tile is not None]
    seconds = {}
    for kind in kinds:
        free(device)
        loss = LOSSES[kind]().prepare(ClassFacts(classes, counts)).to(device)
        step = _kway(problem, loss, tiles=tiles)
        seconds[kind] = measure({"step": step}, device, seconds=size.seconds / 4)["step"]["seconds"]
    return {"classes": classes, "rows": rows, "tiles": tiles, "seconds": seconds}


def fused(size: Size, device: torch.device) -> dict[str, Any]:
    """Measure steps of cross-entropy in which FusedSGD updates the class rows, with tiles if
    possible. The memory includes the class rows."""
    cases = []
    for each in size.fused:
        free(device)
        try:
            found = _fused_step(each, size, device)
        except torch.OutOfMemoryError:
            found = {"error": "out of memory"}
        cases.append({**asdict(each), **found})
    return {"cases": cases}


def _fused_step(case: RowsSize, size: Size, device: torch.device) -> dict[str, Any]:
    before = allocated_bytes(device)
    head = ClassHead(
        case.dim,
        case.classes,
        CrossEntropy(),
        bias=False,
        dtype=ROW_DTYPES[case.dtype],
        memory_mib=case.memory_mib,
        tiles=device.type == "cuda" and optional_triton.is_installed,
        device=device,
    )
    optimizer = FusedSGD(head, lr=0.1)
    features = torch.randn(case.batch, case.dim, device=device, dtype=torch.bfloat16)
    labels = torch.randint(case.classes, (case.batch,), device=device)

    def step() -> None:
        leaf = features.detach().requires_grad_()
        with torch.autocast(device.type, torch.bfloat16):
            loss = head(leaf, labels, rows_of_ranks=[case.batch])
        loss.backward()
        optimizer.step()

    step()
    lasting = allocated_bytes(device) - before
    memory = lasting + peak_bytes(step, device)
    seconds = measure({"step": step}, device, seconds=size.seconds / 2)["step"]["seconds"]
    flops = 4 * 2 * case.batch * case.dim * case.classes
    return {"seconds": seconds, "memory_bytes": memory, "flops_per_second": flops / seconds}


def _kway(problem: Problem, loss: Loss, *, tiles: bool = False) -> Step:
    classes, dim = problem.weights.shape
    head = ClassHead(dim, classes, CrossEntropy(), bias=False, init_std=0, device="meta")
    head.to_empty(device=problem.features.device)
    head.engine = replace(head.engine, loss=loss, tiles=tiles)
    head.weight = nn.Parameter(problem.weights)  # a copy might not fit in memory
    known = {"rows_of_ranks": [len(problem.labels)]}

    def step() -> tuple[Tensor, Tensor, Tensor]:
        features = problem.features.detach().requires_grad_()
        with torch.autocast(features.device.type, torch.bfloat16):
            value = head(features, problem.labels, **known)
        value.backward()
        assert features.grad is not None
        by_weights, head.weight.grad = head.weight.grad, None  # the caller frees it
        assert by_weights is not None
        return value.detach(), features.grad, by_weights

    return step


def _differentiated(problem: Problem, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """Return the step of a loss of features and float32 class weights under autocast."""

    def step() -> tuple[Tensor, Tensor, Tensor]:
        features = problem.features.detach().requires_grad_()
        weights = problem.weights.detach().requires_grad_()
        with torch.autocast(features.device.type, torch.bfloat16):
            loss = loss_of(features, weights)
        loss.backward()
        assert features.grad is not None
        assert weights.grad is not None
        return loss.detach(), features.grad, weights.grad

    return step


def _cross_entropy(problem: Problem) -> Step:
    return _differentiated(problem, lambda x, w: F.cross_entropy(F.linear(x, w), problem.labels))


def _linear_cross_entropy(problem: Problem) -> Step:
    return _differentiated(
        problem, lambda x, w: F.linear_cross_entropy(x, w.bfloat16(), problem.labels)
    )


def _liger(problem: Problem) -> Step:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return _differentiated(problem, lambda x, w: loss(w.bfloat16(), x, problem.labels))


def _cce(problem: Problem, **options: Any) -> Step:
    from cut_cross_entropy import linear_cross_entropy

    return _differentiated(
        problem, lambda x, w: linear_cross_entropy(x, w.bfloat16(), problem.labels, **options)
    )


def _bare(problem: Problem, size: Size, device: torch.device) -> dict[str, Any]:
    """Time the products of a step that saves no logits: logits, logits again, and both gradients,
    in bf16, in blocks of classes."""
    features = problem.features
    rows, dim = features.shape
    weights = problem.weights.bfloat16()
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

    found = measure({"products": products}, device, seconds=size.seconds)["products"]
    flops = 4 * 2 * rows * dim * len(weights)
    return {**found, "flops_per_second": flops / found["seconds"]}


@dataclass(frozen=True)
class Reference:
    """Cross-entropy in float64: the loss, and the gradients of the first rows' features
    [n, d] and of the class weights [n, d] of their labels."""

    loss: Tensor
    by_features: Tensor
    by_weights: Tensor
    labels: Tensor

    @classmethod
    def of(cls, problem: Problem) -> "Reference":
        features, labels = problem.features.double(), problem.labels
        # All contenders multiply class weights rounded to bf16.
        blocks = [block.bfloat16().double() for block in problem.weights[labels].split(_BLOCK)]
        true = (features * torch.cat(blocks)).sum(1)
        total = torch.full_like(true, -torch.inf)
        for block in problem.weights.split(_BLOCK):
            logits = features @ block.bfloat16().double().T
            total = torch.logaddexp(total, logits.logsumexp(1))
        first = labels[:_CHECKED_ROWS]
        num_rows = len(first)
        by_features = -problem.weights[first].bfloat16().double()
        for block in problem.weights.split(_BLOCK):
            rows = block.bfloat16().double()
            shares = (features[:num_rows] @ rows.T - total[:num_rows, None]).exp()
            by_features += shares @ rows
        rows = problem.weights[first].bfloat16().double()
        shares = (features @ rows.T - total[:, None]).exp()
        shares -= (labels[:, None] == first).double()
        mean = len(labels)
        return cls((total - true).mean(), by_features / mean, shares.T @ features / mean, first)

    def errors(self, loss: Tensor, by_features: Tensor, by_weights: Tensor) -> dict[str, float]:
        """Return the relative errors in the Euclidean norm."""
        pairs = {
            "loss": (loss, self.loss),
            "features": (by_features[: len(self.labels)], self.by_features),
            "true_classes": (by_weights[self.labels], self.by_weights),
        }
        return {
            name: float((found.double() - wanted).norm() / wanted.norm())
            for name, (found, wanted) in pairs.items()
        }
