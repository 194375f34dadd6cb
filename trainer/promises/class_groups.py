"""Groups of similar classes, from which classes with few samples take part of their threshold.

With a label tree, a class belongs to the lowest subtree that contains at least eight classes.
Without one, some random classes are the centers, and a class belongs to the center whose row has
the highest cosine similarity to its own. With K classes, there are K / 32 centers, but at most
1,024, so the cost is less than that of scoring 1,024 samples.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ProcessGroup
from torch.nn.functional import normalize

from heads import ClassHead, ClassRows
from heads.collectives import all_reduce_sum
from heads.tree import LabelTree

Groups = NDArray[np.int32]

_LEAST_IN_SUBTREE = 8
_CLASSES_PER_CENTER, _MOST_CENTERS = 32, 1024
_ROWS_AT_ONCE = 16_384
_CLASSES_AT_ONCE = 1 << 20


def groups_of_head(head: ClassHead) -> Groups:
    """Return the group of each class [K] of a head, numbered from 0 (collective)."""
    if head.class_tree.has_children.any():
        return groups_of_tree(head.class_tree)
    return groups_of_rows(
        lambda: head.class_rows(_ROWS_AT_ONCE),
        head.num_classes,
        head.dim,
        device=head.weight.device,
        group=head.engine.class_group,
    )


def groups_of_tree(tree: LabelTree) -> Groups:
    """Return the group of each class [K]: the lowest subtree with at least eight classes, or the
    whole tree.
    """
    groups, below = tree.node_of_class.copy(), tree.num_classes_below()
    is_group = np.zeros(tree.num_nodes, np.bool_)
    for start in range(0, len(groups), _CLASSES_AT_ONCE):
        nodes = groups[start : start + _CLASSES_AT_ONCE]
        while (climbs := (below[nodes] < _LEAST_IN_SUBTREE) & (tree.parent[nodes] >= 0)).any():
            nodes[climbs] = tree.parent[nodes[climbs]]
        is_group[nodes] = True
    del below
    number = np.cumsum(is_group, dtype=np.int32) - 1
    return np.take(number, groups, out=groups)


def groups_of_rows(
    blocks: Callable[[], Iterable[ClassRows]],
    num_classes: int,
    dim: int,
    *,
    device: torch.device | str = "cpu",
    group: ProcessGroup | None = None,
) -> Groups:
    """Return the group of each class [K], by the cosine similarity of rows.

    `blocks` returns the rows of all classes in blocks; it is called twice. If the classes are
    distributed over the ranks of `group`, every rank passes its own blocks (collective).
    """
    num_centers = min(max(1, num_classes // _CLASSES_PER_CENTER), _MOST_CENTERS)
    chosen = np.sort(np.random.default_rng(0).choice(num_classes, num_centers, replace=False))
    ids = torch.from_numpy(chosen).to(device)
    centers = torch.zeros(num_centers, dim, device=device)
    for block in blocks():
        is_center = torch.isin(block.class_ids, ids)
        at = torch.searchsorted(ids, block.class_ids[is_center])
        centers[at] = block.rows[is_center].float()
    centers = normalize(all_reduce_sum(centers, group))
    groups = torch.zeros(num_classes, dtype=torch.int32, device=device)
    for block in blocks():
        # The length of a row does not change which center is the most similar one.
        groups[block.class_ids] = (block.rows.float() @ centers.T).argmax(1).int()
    return all_reduce_sum(groups, group).cpu().numpy()
