"""Append classes to a trained head, and extend the optimizer state of its parameters.

New classes become roots or children of existing nodes. Existing rows and moments keep their values,
but their nodes may be renumbered.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heads.collectives import all_gather_rows, all_reduce_max, group_rank, group_size
from heads.factored import FactoredHead
from heads.head import ClassHead
from heads.rows.initial_rows import initial_bias, write_initial_rows
from heads.rows.node_values import NodeValues
from heads.tree import LabelTree
from heads.weights import ClassWeights, shard_range

_ROWS_AT_ONCE = 1 << 18


def append_to_tree(tree: LabelTree, parents: Sequence[int]) -> tuple[LabelTree, np.ndarray]:
    """Return the tree with one new leaf per new class, and the new index of each old node [N].

    `parents` lists the parent of each new class: a node of `tree`, or -1 for a root. The new
    classes get the IDs K, K + 1, ... in this order. Raises ValueError if a parent is not a node.
    """
    above = np.array(parents, np.int64)
    outside = above[(above < -1) | (above >= tree.num_nodes)]
    if len(outside):
        raise ValueError(
            f"parent {outside[0]} is not a node of the label tree: pass -1 or a node from 0 to "
            f"{tree.num_nodes - 1}"
        )
    old, new = tree.num_nodes, len(above)
    # `from_parents` renumbers the nodes. Assign the temporary class i to node i, so that
    # `node_of_class` of the result maps old node numbers to new ones.
    grown = LabelTree.from_parents(np.concatenate([tree.parent, above]), np.arange(old + new))
    moved = grown.node_of_class
    class_of_node = np.full(old + new, -1, dtype=np.int64)
    class_of_node[moved[:old]] = tree.class_of_node
    class_of_node[moved[old:]] = tree.num_classes + np.arange(new)
    return LabelTree.from_arrays(
        {"parent": grown.parent, "class_of_node": class_of_node}
    ), np.array(moved[:old])


def append_classes(
    head: ClassHead,
    parents: Sequence[int],
    *,
    optimizer: Optimizer | None = None,
    seed: int = 0,
    init_std: float = 0.01,
) -> None:
    """Append one class per entry of `parents` to `head`, in place (collective).

    The scores of existing classes do not change. New rows are initialized like the leaves of a new
    `ClassHead`. The moments of existing rows of `head.weight` and `head.bias` in `optimizer` are
    preserved; the moments of new rows are zero. Raises ValueError if the head or its loss stores
    per-class data, such as the noise distribution of nce.
    """
    tree, moved = _grown_tree(head, parents)
    first = head.tree.num_classes
    weights = head.engine.weights.rebuilt(tree, head.engine.weights.device)
    move = partial(_moved_rows, head=head, moved=moved, weights=weights)
    held, scales = move(head.weight.detach()), head.row_scales
    rows = NodeValues(held, None if scales is None else move(scales))
    write_initial_rows(rows, weights, seed=seed, std=init_std, first_class=first)
    parameters = {"weight": nn.Parameter(rows.held)}
    if head.bias is not None:
        entries = move(head.bias.detach())
        entries += initial_bias(weights, head.loss, first_class=first)
        parameters["bias"] = nn.Parameter(entries)
    for name, parameter in parameters.items():
        if optimizer is not None:
            old = head.get_parameter(name)
            optimizer.state[parameter] = {
                moment: move(value)
                if isinstance(value, Tensor) and value.shape == old.shape
                else value
                for moment, value in optimizer.state.pop(old, {}).items()
            }
            for group in optimizer.param_groups:
                group["params"] = [parameter if p is old else p for p in group["params"]]
        setattr(head, name, parameter)
    head.row_scales = rows.scales
    head.tree = tree
    head.engine = replace(head.engine, weights=weights)


def _grown_tree(head: ClassHead, parents: Sequence[int]) -> tuple[LabelTree, np.ndarray]:
    """Return the results of `append_to_tree`; an error on one rank is raised on all (collective).

    Otherwise, the other ranks would wait for the failed rank in the next collective.
    """
    found, problem = None, None
    try:
        found = append_to_tree(head.tree, parents)
        _check_constants(head, found[0].num_classes, parents)
    except ValueError as error:
        problem = error
    bad = torch.tensor(int(problem is not None), device=head.engine.weights.device)
    for group in (head.engine.class_group, head.engine.data_group):
        all_reduce_max(bad, group)
    if problem is not None:
        raise problem
    if bad or found is None:
        raise ValueError(
            "another rank failed to append the classes: pass the same parents on every rank"
        )
    return found


def _check_constants(head: ClassHead, num_classes: int, parents: Sequence[int]) -> None:
    head.loss.check_classes(num_classes)
    if isinstance(head, FactoredHead) and any(parent != -1 for parent in parents):
        raise ValueError("classes of a factored head have no parents: pass -1 for each class")
    if head.engine.log_prior is not None:
        raise ValueError(
            f"the head has a prior for {head.num_classes} classes, but none for new classes: "
            "create the head without a prior"
        )
    if head.engine.class_weights is not None:
        raise ValueError(
            f"the head has class_weights for {head.num_classes} classes, but none for new classes: "
            "create the head without class_weights"
        )


def _moved_rows(rows: Tensor, head: ClassHead, moved: np.ndarray, weights: ClassWeights) -> Tensor:
    """Return this rank's rows in the new numbering, zero for new classes (collective).

    A row may move to another rank. Each round all-gathers at most `_ROWS_AT_ONCE` rows per rank,
    which bounds the extra memory.
    """
    group = head.engine.class_group
    size, rank = group_size(group), group_rank(group)
    ranges = [shard_range(head.tree.num_nodes, r, size) for r in range(size)]
    # gloo cannot send fp8 numbers, so move the bytes of each row.
    content = rows.reshape(len(rows), -1).view(torch.uint8)
    result = content.new_zeros((weights.num_held, content.shape[1]))
    longest = max(stop - start for start, stop in ranges)
    for offset in range(0, longest, _ROWS_AT_ONCE):
        parts = [
            (min(start + offset, stop), min(start + offset + _ROWS_AT_ONCE, stop))
            for start, stop in ranges
        ]
        mine = slice(parts[rank][0] - ranges[rank][0], parts[rank][1] - ranges[rank][0])
        gathered = all_gather_rows(content[mine], [b - a for a, b in parts], group)
        target = moved[np.concatenate([np.arange(a, b) for a, b in parts])]
        here = np.flatnonzero((target >= weights.start) & (target < weights.stop))
        positions = torch.from_numpy(target[here] - weights.start).to(rows.device)
        result[positions] = gathered[torch.from_numpy(here).to(rows.device)]
    return result.view(rows.dtype).reshape(weights.num_held, *rows.shape[1:])
