"""The invariants of cover trees with many blocks of candidates, tiles and batches."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heads.tree import CoverTree, build_cover_tree, net, tiles
from tests.heads.clustered import clustered
from tests.heads.test_cover_tree import (
    BASES,
    check_invariants,
    check_label_trees,
    distances,
    rows_of,
)

KINDS = ["random", "clustered", "duplicated", "zeros", "parallel", "grid", "dust"]


def many_rows_of(kind: str, rng: np.random.Generator, num: int) -> np.ndarray:
    match kind:
        case "grid":  # nearly all distances are tied
            return rng.integers(-2, 3, size=(num, 3)).astype(float)
        case "dust":  # clusters smaller than the float32 rounding error of their coordinates
            centers = rng.normal(size=(5, 4))
            return centers[rng.integers(0, 5, num)] + 1e-7 * rng.normal(size=(num, 4))
    rows = rows_of(kind, rng)
    extra = rows[rng.integers(0, len(rows), num)] * rng.uniform(0.7, 1.3, (num, 1))
    return np.concatenate([rows, extra + 0.1 * rng.normal(size=extra.shape)])


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(KINDS),
    base=st.sampled_from(BASES),
    metric=st.sampled_from(["cosine", "euclidean"]),
)
def test_invariants_hold_with_many_small_tiles_and_blocks(seed, kind, base, metric):
    rng = np.random.default_rng(seed)
    rows = many_rows_of(kind, rng, int(rng.integers(20, 120)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(net, "_SECTION", int(rng.integers(2, 20)))
        patch.setattr(net, "_BLOCK", int(rng.integers(1, 12)))
        patch.setattr(net, "_REGION_MEMBERS", int(rng.integers(1, 8)))
        patch.setattr(net, "_PAIR_VALUES", 50)
        use_small_tiles(patch, rng)
        tree = build_cover_tree(rows, base=base, metric=metric)
        assert same(tree, build_cover_tree(rows, base=base, metric=metric))
    check_invariants(tree, distances(rows, metric))
    check_label_trees(tree)


def use_small_tiles(patch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    patch.setattr(tiles, "_CLASSES", int(rng.integers(1, 40)))


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_and_threads_do_not_change_the_tree(kind, monkeypatch, restored_threads):
    rng = np.random.default_rng(KINDS.index(kind))
    rows = many_rows_of(kind, rng, 600)
    monkeypatch.setattr(net, "_BLOCK", 16)  # several batches at each level
    monkeypatch.setattr(net, "_SECTION", 32)
    expected, trees = build_cover_tree(rows), []
    for num_threads in (1, 3):
        with pytest.MonkeyPatch.context() as patch:
            use_small_tiles(patch, rng)
            torch.set_num_threads(num_threads)
            trees.append(build_cover_tree(rows))
    assert all(same(tree, expected) for tree in trees)


def test_the_tree_is_the_same_as_in_earlier_versions():
    """Checkpoints of `vtree` and `utree` runs need the tree that they were trained with."""
    rng = np.random.default_rng(20)
    rows = np.concatenate([rng.random((3000, 24)), clustered(3000, 24, seed=1)])
    rows[::50] = rows[1::50]
    assert build_cover_tree(rows).vtree().digest() == "140f6fd6eba47948"


def same(one: CoverTree, other: CoverTree) -> bool:
    return np.array_equal(one.center_parent, other.center_parent) and np.array_equal(
        one.level, other.level
    )
