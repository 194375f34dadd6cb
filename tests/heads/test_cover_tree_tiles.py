"""Tiles of cover trees are narrow for clusters and wide otherwise, and miss no nearest member."""

import numpy as np

from heads.tree.tiles import Tile, cut_tiles


def tiles_of(points: np.ndarray, nearest: np.ndarray) -> list[Tile]:
    gaps = np.square(points - points[nearest]).sum(1)
    order = np.argsort(nearest, kind="stable")
    return cut_tiles(points, order, nearest[order], gaps[order])


def test_every_distant_cluster_has_a_tile():
    rng = np.random.default_rng(0)
    cluster = np.sort(rng.permutation(np.arange(2000) % 40))
    points = rng.normal(size=(40, 200))[cluster] + 0.3 * rng.normal(size=(2000, 200))
    tiles = tiles_of(points, 50 * cluster)
    assert [np.unique(cluster[tile.ids]).tolist() for tile in tiles] == [[i] for i in range(40)]


def test_vectors_without_clusters_have_wide_tiles():
    points = np.random.default_rng(1).normal(size=(5000, 200))
    nearest = np.arange(5000) % 300  # 300 members of a net, none of which is close
    tiles = tiles_of(points, nearest)
    assert len(tiles) <= 5
    assert sorted(np.concatenate([tile.ids for tile in tiles])) == list(range(5000))


def test_the_pairs_of_a_tile_include_all_nearest_members():
    rng = np.random.default_rng(2)
    points = 1 + 1e-3 * rng.integers(-3, 4, size=(400, 3))  # with many ties
    tile, members = Tile(points, np.arange(300)), points[300:]
    squares = np.square(points[:300] - members[:, None]).sum(2)
    gaps = np.full(300, np.median(squares))
    found = set(zip(*tile.closer(members, gaps), strict=True))
    nearest = np.isclose(squares, squares.min(0), rtol=1e-9, atol=0) & (squares < gaps)
    assert {*zip(*np.nonzero(nearest), strict=True)} <= found
    assert len(found) < nearest.size / 4
