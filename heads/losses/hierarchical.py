"""Hierarchical softmax (Morin and Bengio 2005) as a loss over the nodes of a label tree."""

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from heads.losses.base import (
    STRICT,
    Block,
    Choice,
    ClassFacts,
    HeldClasses,
    Loss,
    Reduction,
    Rows,
    Stats,
    logsumexp,
)

# Shape legend: B rows, C nodes of a block, D levels of the tree.


@dataclass(frozen=True, config=STRICT)
class HierarchicalSoftmax(Loss):
    """-log p(y), averaged over rows.

    The columns of the logits are the nodes of `tree`, and the labels are leaves. The statistics are
    the logsumexp over the siblings of the label's ancestor at each level [B, D], and the sum of the
    logits on the path [B].

    Not aligned: only differences between the logits of siblings on the path of a row matter.
    """

    kind: Literal["hierarchical_softmax"] = Field(
        default="hierarchical_softmax", kw_only=True, repr=False
    )

    # Set by `prepare`: the parent (-1: a root) and the depth of each node.
    parent: ClassVar[Tensor]
    depth: ClassVar[Tensor]
    num_levels: ClassVar[int]

    paper = "Morin and Bengio 2005, cited by 000"
    without_tile = "it computes only the classes near the path of a row"
    statistic = "logsumexp z of the siblings at each level, sum of z on the path"
    aligned = False
    over_nodes = True
    reductions = (Reduction.LOGSUMEXP, Reduction.SUM)

    def prepare(self, facts: ClassFacts) -> Self:
        if facts.tree is None:
            raise ValueError(
                "hierarchical_softmax is a loss over the nodes of a label tree: "
                "use HierarchicalSoftmaxHead instead of ClassHead"
            )
        assert facts.tree.num_nodes == facts.num_classes
        return self.with_constants(
            parent=torch.tensor(facts.tree.parent, dtype=torch.int64),
            depth=torch.tensor(facts.tree.depth, dtype=torch.int64),
            num_levels=int(facts.tree.depth.max()) + 1,
        )

    def choose(self, held: HeldClasses, labels: Tensor, draw: int | None) -> Choice:
        """Choose the siblings of the nodes on the paths of the batch.

        No other nodes occur in the softmaxes of these paths, so the loss is exact.
        """
        on_path = torch.zeros(len(self.parent) + 1, dtype=torch.bool, device=labels.device)
        on_path[self._paths(labels)] = True
        on_path[-1] = True  # above the roots
        return Choice(on_path[self.parent[held.class_ids]].nonzero().squeeze(1))

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        path_BD = self._paths(block.labels)
        parent, depth = self.parent[block.class_ids], self.depth[block.class_ids]
        # The columns of a block are in ascending order of nodes.
        column_BD = torch.searchsorted(block.class_ids, path_BD).clamp_(
            max=len(block.class_ids) - 1
        )
        here = block.class_ids[column_BD] == path_BD
        on_path = logits_BC.gather(1, column_BD).where(here, 0).sum(1)
        levels = []
        for level in range(self.num_levels):
            columns = (depth == level).nonzero().squeeze(1)
            if not len(columns):
                levels.append(torch.full_like(logits_BC[:, 0], -torch.inf))
                continue
            logits = logits_BC[:, columns]
            above = path_BD[:, level - 1 : level] if level else torch.full_like(path_BD[:, :1], -1)
            # A row whose path ends above this level has no siblings here.
            sibling = (parent[columns] == above) & (path_BD[:, level : level + 1] >= 0)
            levels.append(logsumexp(logits.masked_fill(~sibling, -torch.inf)))
        return torch.stack(levels, dim=1), on_path

    def identity(self, like: Tensor) -> Stats:
        nothing = like.new_full((len(like), self.num_levels), -torch.inf)
        return nothing, torch.zeros_like(like)

    def value(self, total: Stats, rows: Rows) -> Tensor:
        siblings, on_path = total
        # Levels below the label's leaf are -inf and do not contribute to its probability.
        factors = torch.where(siblings == -torch.inf, 0, siblings)
        return rows.mean(factors.sum(1) - on_path)

    def _paths(self, leaves: Tensor) -> Tensor:
        """Return the node at each level of each leaf's path [B, D]; -1 below the leaf."""
        paths = leaves.new_full((len(leaves), self.num_levels), -1)
        rows, nodes = torch.arange(len(leaves), device=leaves.device), leaves
        while len(nodes):
            paths[rows, self.depth[nodes]] = nodes
            above = self.parent[nodes]
            rows, nodes = rows[above >= 0], above[above >= 0]
        return paths
