"""The class head: class weights x a loss, as one module on top of any features.

`ClassHead(features, labels)` returns the loss of the global batch; `class_rows` hands out the rows
of the classifier for evaluation and export. Training loops, checkpoints and files are not here.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from heads.collectives import all_reduce_sum, group_rank, group_size
from heads.dtensors import sharded_rows
from heads.engine import Engine
from heads.gradients import squared_norm
from heads.initial_rows import initial_bias, initial_rows
from heads.inputs import Parameters, RowWeighting, class_ids
from heads.logits import ClassRows, Dot, LogitMap, log_prior
from heads.losses import ClassFacts, Loss
from heads.tree import LabelTree
from heads.weights import ClassWeights


@dataclass(frozen=True)
class ClassScores:
    """Scores of some classes: `class_ids` [C] and `scores` [b, C]."""

    class_ids: Tensor
    scores: Tensor


class ClassHead(nn.Module):
    """Class weights x a logit map x a loss, sharded over a mesh's `class` axis.

    `tree` is a number of classes (dense weights) or a `LabelTree`. `mesh` is a 2-D `DeviceMesh`
    with axes `data` and `class`; None is one process. Every rank holds `weight`, its contiguous
    rows [n, dim] of the node matrix, and `bias`, their entries [n] (None without a bias). Leaves
    start normal with `init_std`, keyed by (seed, class), inner nodes at zero. The bias starts with
    the value that the loss asks for at the roots, so that every class has it once. By default there
    is one where the logit map allows it. A learned scale or offset of `logits` is a scalar of its
    own, `log_scale` or `offset`, the same on every rank.

    Some losses need more about the classes: `class_counts` [K] are the numbers of training samples,
    `label_vectors` [K, D] the label vectors.

    A row of label j weighs `class_weights[j]` (None: 1), one of label `ignore_index` nothing. With
    `gradient_damping` p the gradient of an inner node of a tree, a sum over the classes below it,
    is divided by their number to the power p.

    A loss that samples classes draws anew in every call with gradients in training mode: `draw`
    counts them, and setting it to where another run stood draws what that one drew.

    With `accumulates` set, gradients of several calls add up on each rank, and `reduce_gradients`
    sums them over the mesh's `data` axis once.

    >>> head = ClassHead(512, 1_000_000, CrossEntropy())
    >>> loss = head(features, labels)   # features [b, 512], labels [b]; the global-mean loss
    >>> loss.backward()
    """

    accumulates = False

    def __init__(
        self,
        dim: int,
        tree: LabelTree | int,
        loss: Loss,
        *,
        logits: LogitMap | None = None,
        bias: bool | None = None,
        mesh: DeviceMesh | None = None,
        seed: int = 0,
        init_std: float = 0.01,
        memory_mib: int = 256,
        class_weights: Tensor | None = None,
        class_counts: Tensor | None = None,
        label_vectors: Tensor | None = None,
        ignore_index: int | None = None,
        gradient_damping: float = 0.0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.dim, self.mesh = dim, mesh
        self.seed, self.draw = seed, 0
        self.tree = LabelTree.dense(tree) if isinstance(tree, int) else tree
        facts = ClassFacts(self.tree.num_classes, class_counts, label_vectors)
        class_group, data_group = _group(mesh, "class"), _group(mesh, "data")
        self.logit_map = logits = logits or Dot()
        if bias and logits.normalizes:
            raise ValueError(f"{logits.kind} logits have no bias: leave it out, or learn an offset")
        self._fixed_map = logits.evaluated(scale=logits.scale, offset=logits.offset)
        weights = ClassWeights(
            self.tree,
            group_rank=group_rank(class_group),
            group_size=group_size(class_group),
            device=torch.device(device),
            damping=gradient_damping,
        )
        self.engine = Engine(
            weights,
            self._prepared(loss, facts).to(torch.device(device)),
            class_group,
            data_group,
            logits,
            memory_bytes=memory_mib << 20,
            log_prior=self._log_prior(class_counts, device, dtype),
            row_weighting=RowWeighting(
                _checked_weights(class_weights, self.tree.num_classes, device), ignore_index
            ),
        )
        rows = self.initial_rows(weights, seed=seed, std=init_std)
        self.weight = nn.Parameter(torch.from_numpy(rows).to(device, dtype))
        entries = torch.from_numpy(initial_bias(weights, self.loss)).to(device, dtype)
        has_bias = not logits.normalizes if bias is None else bias
        self.bias = nn.Parameter(entries) if has_bias else None
        log_scale = torch.tensor(math.log(logits.scale), device=device, dtype=dtype)
        self.log_scale = nn.Parameter(log_scale) if logits.learn_scale else None
        offset = torch.tensor(logits.offset, device=device, dtype=dtype)
        self.offset = nn.Parameter(offset) if logits.learn_offset else None

    @property
    def num_classes(self) -> int:
        return self.tree.num_classes

    @property
    def loss(self) -> Loss:
        return self.engine.loss

    # Compiled, it would be compiled anew in every call: dynamo takes `draw` for a constant.
    @torch.compiler.disable
    def forward(
        self, features: Tensor, labels: Tensor, row_weights: Tensor | None = None
    ) -> Tensor:
        """The loss of the global batch, a scalar that is the same on every rank (collective).

        `features` [b, dim] and `labels` [b] are this rank's rows; b may differ over ranks and be 0.
        `row_weights` [b], floats of 0 or more, multiply what each row weighs in the mean; give them
        on every rank or on none. In training mode logits have the margin and the prior of the logit
        map.

        Raises, on every rank, ValueError for labels outside the classes or weights that do not fit,
        FloatingPointError where the loss is NaN.
        """
        draw = None
        if self.training and torch.is_grad_enabled():
            draw = ((self.seed << 32) + self.draw) % 2**63
            self.draw += 1
        return self.engine(
            features,
            labels,
            Parameters(self.weight, self.bias, self.log_scale, self.offset),
            row_weights=row_weights,
            training=self.training,
            draw=draw,
            over_data=not self.accumulates,
        )

    def reduce_gradients(self) -> None:
        """Sum the gradients over the mesh's `data` axis, where `accumulates` has left them unsummed
        (collective)."""
        if self.accumulates:
            for grad in self._gradients():
                all_reduce_sum(grad, self.engine.data_group)

    def squared_gradient_norm(self) -> Tensor:
        """The squared norm of the gradient of all ranks' rows, a float64 scalar (collective)."""
        held = squared_norm(self._gradients(replicated=False), self.weight.device)
        replicated = squared_norm(self._gradients(held=False), self.weight.device)
        return all_reduce_sum(held, self.engine.class_group) + replicated

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the gradients by a scalar, the same on every rank."""
        for grad in self._gradients():
            grad *= factor

    def tree_digest(self) -> str:
        """A digest of the label tree. With another tree, the rows would belong to other classes."""
        return self.tree.digest()

    def row_weights(self, labels: Tensor, factors: Tensor | None = None) -> Tensor:
        """What each row weighs in the mean [b], `factors` being the `row_weights` of `forward`."""
        return self.engine.row_weighting(class_ids(labels), factors)

    def logits(self, features: Tensor, classes: ClassRows) -> Tensor:
        """`features` [b, dim] -> the logits [b, C] of `classes`, in the rows' precision and without
        the margin and the prior of training."""
        return self.evaluated_map()(features, classes)

    def evaluated_map(self) -> LogitMap:
        """The logit map with the current scale and offset, as evaluation and serving apply it."""
        if self.log_scale is None and self.offset is None:
            return self._fixed_map
        scale, offset = self.logit_map.scale, self.logit_map.offset
        if self.log_scale is not None:
            scale = self.log_scale.exp().item()
        if self.offset is not None:
            offset = self.offset.item()
        return self.logit_map.evaluated(scale=scale, offset=offset)

    def score_blocks(self, features: Tensor, classes_at_once: int = 4096) -> Iterator[ClassScores]:
        """Scores [b, C] of `features` [b, dim] for this rank's classes, in blocks (collective when
        it starts); over the ranks of the `class` axis every class comes exactly once."""
        logit_map = self.evaluated_map()
        for block in self.class_rows(classes_at_once):
            scores = self.loss.score(logit_map(features, block))
            yield ClassScores(block.class_ids, scores)

    def class_rows(self, classes_at_once: int = 4096) -> Iterator[ClassRows]:
        """This rank's rows of the classifier, in blocks of node order (collective when it starts).

        Over the ranks of the `class` axis every class comes exactly once.
        """
        weights, group = self.engine.weights, self.engine.class_group
        rows, bias = weights.with_boundary(self.weight.detach(), group), None
        if self.bias is not None:
            bias = weights.with_boundary(self.bias.detach().unsqueeze(1), group)
        for block in weights.blocks(classes_at_once):
            entries = None if bias is None else weights.rows(block, bias).squeeze(1)
            yield ClassRows(block.class_ids, weights.rows(block, rows), entries)

    def sharded(self, rows: Tensor) -> Tensor:
        """A tensor laid out as this rank's `weight` or `bias` (or an optimizer's moment of it), as
        the `Shard(0)` DTensor that a checkpoint reshards; unchanged in one process, as is a scalar.
        """
        if self.mesh is None or not rows.ndim:
            return rows
        shape = torch.Size((self.tree.num_nodes, *rows.shape[1:]))
        return sharded_rows(rows, self.mesh["class"], shape)

    def _apply(self, fn: Any, recurse: bool = True) -> "ClassHead":
        """What `Module.to` and its like do: the plan and the constants follow the weight."""
        super()._apply(fn, recurse)
        device = self.weight.device
        if device != self.engine.weights.device and device.type != "meta":
            self.engine = self.engine.to(device)
        return self

    def _gradients(self, *, held: bool = True, replicated: bool = True) -> list[Tensor]:
        """Those that there are, of what this rank holds and of the scalars that every rank has."""
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        return [grad for grad in grads if (held if grad.ndim else replicated)]

    def _log_prior(
        self,
        class_counts: Tensor | None,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> Tensor | None:
        tau = self.logit_map.prior
        if not tau:
            return None
        if class_counts is None:
            raise ValueError(
                f"the prior of {self.logit_map.kind} logits needs the training samples of each "
                "class: pass class_counts"
            )
        return log_prior(tau, _checked_counts(class_counts, self.num_classes)).to(device, dtype)

    def _prepared(self, loss: Loss, facts: ClassFacts) -> Loss:
        return loss.prepare(facts)

    def initial_rows(
        self, weights: ClassWeights, *, seed: int, std: float, first_class: int = 0
    ) -> np.ndarray:
        """The rows [n, dim] of `heads/initial_rows.py`; a subclass may start with others."""
        return initial_rows(weights, self.dim, seed=seed, std=std, first_class=first_class)


def _checked_counts(counts: Tensor, num_classes: int) -> Tensor:
    counts = torch.as_tensor(counts)
    if counts.shape != (num_classes,) or not (counts >= 0).all():
        raise ValueError(
            f"class counts have shape {list(counts.shape)}: pass {num_classes} numbers of 0 or more"
        )
    return counts


def _checked_weights(
    weights: Tensor | None, num_classes: int, device: torch.device | str
) -> Tensor | None:
    if weights is None:
        return None
    weights = torch.as_tensor(weights)
    fits = weights.shape == (num_classes,) and weights.isfinite().all() and (weights >= 0).all()
    if not fits or not weights.any():
        raise ValueError(
            f"class weights have shape {list(weights.shape)}: give {num_classes} finite numbers "
            "that are not negative, one a class, and not all of them zero"
        )
    return weights.to(device)


def _group(mesh: DeviceMesh | None, axis: str) -> ProcessGroup | None:
    return None if mesh is None else mesh.get_group(axis)
