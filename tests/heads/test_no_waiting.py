"""With known row counts, a step of a head does not make the host wait for the device.

Exceptions are losses that select classes in each step, by sampling or by the paths of a hierarchy.
"""

from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from heads import ClassHead, CrossEntropy, LabelSets
from heads.engine.agreement import non_finite_rows
from tests.heads.cases import LOGIT_MAPS, LOSS_KINDS, WEIGHTINGS, label_tree, make_loss
from tests.heads.set_cases import SET_KINDS, label_sets
from tests.host_reads import host_reads
from tests.ranks import rank_mesh, run_on_ranks

NUM_CLASSES, DIM = 150, 6


def make_head(kind: str, weighting: str, logits: str, **options: object) -> ClassHead:
    return ClassHead(
        DIM,
        label_tree(weighting, NUM_CLASSES),
        make_loss(kind, NUM_CLASSES),
        logits=LOGIT_MAPS[logits],
        class_counts=torch.arange(NUM_CLASSES),
        **options,
    )


def reads_of_step(head: ClassHead, rows: list[int], *, of_sets: bool = False) -> list[str]:
    """Return the reads in a step with saved graphs and in a step in blocks; `rows` lists the number
    of rows of each rank."""
    rank = head.mesh.get_rank() if head.mesh is not None else 0
    num_rows, found = rows[rank], []
    sets = [label_sets(NUM_CLASSES, num) for num in rows]
    known: dict[str, Any] = {"rows_of_ranks": rows}
    if of_sets:
        known["labels_of_ranks"] = [sum(map(len, each)) for each in sets]
    for memory in (1 << 28, 1):
        object.__setattr__(head.engine, "memory_bytes", memory)
        features = torch.randn(num_rows, DIM, requires_grad=True)
        labels: Tensor | LabelSets = torch.randint(NUM_CLASSES, (num_rows,))
        weights = torch.rand(num_rows)
        if of_sets:
            labels = LabelSets.of(sets[rank])
        with host_reads() as reads:
            loss = head(features, labels, weights, **known)
            loss.backward()
            non_finite_rows(features)
            head.squared_gradient_norm()
        found += reads
    return found


WEIGHTS = torch.arange(1.0, NUM_CLASSES + 1)
Head = tuple[str, str, str, dict[str, Any]]
# Every loss and every logit map with one weighting, and the options of a head.
HEADS: list[Head] = [
    *((kind, weights, "dot", {}) for kind, weights in zip(LOSS_KINDS, cycle(WEIGHTINGS))),
    *(("ce", weights, logits, {}) for logits, weights in zip(LOGIT_MAPS, cycle(WEIGHTINGS))),
    ("ce", "vtree", "dot", {"class_weights": WEIGHTS, "gradient_damping": 0.5}),
]


def reads_of_heads(class_ranks: int | None, rows: list[int]) -> list[str]:
    mesh = None if class_ranks is None else rank_mesh(len(rows) // class_ranks)
    found = []
    for kind, weighting, logits, options in HEADS:
        head = make_head(kind, weighting, logits, mesh=mesh, **options)
        found += [f"{kind} {weighting} {logits}: {r}" for r in reads_of_step(head, rows)]
    for kind, weighting, logits in zip(SET_KINDS, cycle(WEIGHTINGS), LOGIT_MAPS):
        head = make_head(kind, weighting, logits, mesh=mesh)
        found += [f"{kind} with sets: {r}" for r in reads_of_step(head, rows, of_sets=True)]
    return found


def test_no_head_waits_in_one_process() -> None:
    assert reads_of_heads(None, [4]) == []


@pytest.mark.parametrize(
    ("class_ranks", "rows"), [(2, [3, 0]), (1, [3, 2])], ids=["sharded", "copies"]
)
def test_no_head_waits_on_several_ranks(class_ranks: int, rows: list[int]) -> None:
    for reads in run_on_ranks(len(rows), reads_of_heads, class_ranks, rows):
        assert reads == []


def rows_of(num_rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(num_rows, DIM, generator=generator)
    return features, torch.randint(NUM_CLASSES, (num_rows,), generator=generator)


def test_a_wrong_row_count_is_rejected() -> None:
    head = ClassHead(DIM, NUM_CLASSES, CrossEntropy())
    features, labels = rows_of(4)
    with pytest.raises(
        ValueError, match="lists 3 rows for this rank, but features have 4 rows and there are 4"
    ):
        head(features, labels, rows_of_ranks=[3])


def test_a_nan_loss_is_returned_and_described_later() -> None:
    head = ClassHead(DIM, NUM_CLASSES, CrossEntropy())
    features, labels = rows_of(12)
    features[[1, 4]] = torch.nan
    assert head(features, labels, rows_of_ranks=[12]).isnan()
    with pytest.raises(FloatingPointError) as immediate:
        head(features, labels)
    assert str(head.nan_error(12, non_finite_rows(features))) == str(immediate.value)
    assert "2 of 12 rows of features (rows 1, 4)" in str(immediate.value)


def test_only_the_first_rows_that_are_not_finite_are_listed() -> None:
    features = torch.ones(20, 2)
    features[5:, 0] = torch.inf
    assert non_finite_rows(features).tolist() == [15, 5, 6, 7, 8, 9, 10, 11, 12]
    assert non_finite_rows(torch.ones(1, 2)).tolist() == [0, *[-1] * 8]
    assert non_finite_rows(torch.ones(0, 2)).tolist() == [0, *[-1] * 8]
