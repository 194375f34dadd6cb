"""The simulated traffic of class blocks with tiles, compared with closed forms."""

from dataclasses import replace
from pathlib import Path

import pytest

from heads.tiles.operators import KernelConfig
from launch.plan.advice import warnings
from launch.plan.cluster import machine_named
from launch.plan.plan import Plan, PlanRequest, make_plan
from launch.plan.tile_traffic import Cache, Matrix, TileBlock, block_traffic
from tests.shards import glyph_recipe

TILE = 128
ROWS, CLASSES, DIM = 1024, 4096, 256
BLOCK = TileBlock(
    rows=ROWS,
    classes=CLASSES,
    dim=DIM,
    itemsize=2,
    sums_columns=True,
    config=KernelConfig(TILE, TILE, 64, num_warps=8, num_stages=3),
    num_sms=132,
    cache_bytes=1 << 40,
)
FEATURES, CLASS_ROWS, LOGITS = 2 * ROWS * DIM, 2 * CLASSES * DIM, 2 * ROWS * CLASSES


def test_a_cache_evicts_what_was_not_used_for_longest():
    matrix = Matrix("m", 64, 3 * 64, itemsize=1)
    first, second, third = matrix.pieces(0, 64, 0, 3 * 64)
    cache = Cache(2 * 64 * 64)
    cache.read([first, second, first, third])  # evicts the second
    assert cache.hbm == 3 * 64 * 64
    cache.read([first, third])
    assert cache.hbm == 3 * 64 * 64
    cache.read([second])
    assert cache.hbm == 4 * 64 * 64


def test_a_cache_writes_a_changed_piece_once_when_it_is_evicted():
    (piece,) = Matrix("m", 10, 20, itemsize=4).pieces(0, 128, 0, 128)
    cache = Cache(1 << 20)
    cache.write([piece, piece])
    cache.read([piece])
    assert cache.hbm == 0
    cache.flush()
    cache.flush()
    assert cache.hbm == 10 * 20 * 4


def test_a_cache_larger_than_all_tensors_reads_and_writes_each_of_them_once():
    found = block_traffic(BLOCK)
    assert found.statistics.hbm == CLASS_ROWS
    assert found.gradient.hbm == CLASS_ROWS
    assert found.column_sum.hbm == 0
    assert found.feature_product.hbm == 2 * FEATURES  # float32, read for the sum over blocks
    assert found.row_product.hbm == 2 * FEATURES + 2 * CLASS_ROWS + LOGITS  # written at the end


@pytest.mark.parametrize("cache_bytes", [1 << 14, 1 << 21, 1 << 40])
@pytest.mark.parametrize("rows", [ROWS, 200])
def test_the_bytes_of_the_sms_do_not_depend_on_the_cache(rows: int, cache_bytes: int):
    found = block_traffic(replace(BLOCK, rows=rows, cache_bytes=cache_bytes))
    groups, tiles = -(-rows // TILE), CLASSES // TILE
    operands = 2 * DIM * (tiles * rows + groups * CLASSES)
    assert found.statistics.l2 == operands
    assert found.gradient.l2 == operands + 2 * rows * CLASSES
    assert found.column_sum.l2 == 2 * rows * CLASSES
    across = DIM // TILE
    assert found.feature_product.l2 == (
        2 * CLASSES * (across * rows + groups * DIM) + 2 * 4 * rows * DIM
    )
    assert found.row_product.l2 == (2 * rows * (across * CLASSES + tiles * DIM) + 4 * CLASSES * DIM)
    assert all(each.hbm <= 2 * each.l2 for each in found.products)


def test_without_a_cache_the_programs_of_a_wave_share_only_what_they_read_in_one_step():
    found = block_traffic(replace(BLOCK, cache_bytes=0, num_sms=16, sums_columns=False))
    # A wave of 16 programs: all 8 groups of rows, for 2 of the 32 groups of classes.
    waves = CLASSES // TILE // 2
    assert found.gradient.hbm == waves * FEATURES + CLASS_ROWS + LOGITS
    # 8 programs for each group of rows, 2 of which run at a time.
    assert found.statistics.hbm == waves * FEATURES + CLASS_ROWS


def plan_of(folder: Path, gpus: int, *, tiles: bool, **head: object) -> Plan:
    recipe = glyph_recipe(
        folder,
        folder / "run",
        head={"memory_mib": 64, "tiles": tiles} | head,
        train__global_batch=255,
        train__precision="bf16",
    )
    machine = machine_named("h100", link_gbps=None, ranks_per_node=1)
    return make_plan(recipe, PlanRequest(machine, 1, gpus, 100_000))


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_a_plan_with_tiles_computes_the_same_products_and_moves_fewer_bytes(
    tmp_path: Path, bias: bool, gpus: int
):
    plans = [plan_of(tmp_path, gpus, tiles=tiles, bias=bias) for tiles in (False, True)]
    without, with_tiles = (plan.operations.phases["head"] for plan in plans)
    logits, dim = 255 * 100_000 // gpus, plans[0].backbone.dim
    blocks = plans[0].head.blocks
    assert blocks > 2
    # Two products for the logits and two for the gradients.
    assert sum(each.flops * number for each, number in with_tiles.items()) == 8 * logits * dim
    moved, moved_without = (
        sum(each.bytes * number for each, number in operations.items())
        for operations in (with_tiles, without)
    )
    # The gradient of the logits is written once, in half precision, and read by two products and
    # the sum for the bias, at most. No other tensor has the size of the logits.
    assert 2 * logits < moved < (3 + bias) * 2 * logits + 0.2 * moved_without
    assert moved < 0.3 * moved_without
    assert plans[1].operations.block_launches < plans[0].operations.block_launches
    assert plans[1].time.seconds < plans[0].time.seconds


def test_a_plan_warns_of_gpus_that_do_not_support_tiles(tmp_path: Path):
    plan = plan_of(tmp_path, 1, tiles=True)
    old = machine_named("t4", link_gbps=None, ranks_per_node=1)
    assert not any("tiles" in line for line in warnings(plan))
    on_old = replace(plan, cluster=replace(plan.cluster, machine=old))
    assert any("t4 does not support tiles" in line for line in warnings(on_old))
