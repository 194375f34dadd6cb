"""Rows of class weights can be read in any order, from disk or from the cache."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer.bundle.row_file import RowFile, write_rows

ROWS, WIDTH = 2500, 5
WEIGHT = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_rows(tmp_path / "w", WEIGHT.split(700), name="weight", num_rows=ROWS, width=WIDTH)
    return tmp_path / "w"


def open_rows(path: Path, cache_bytes: int = 0) -> RowFile:
    return RowFile(path, name="weight", num_rows=ROWS, width=WIDTH, cache_bytes=cache_bytes)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows in each read from disk."""
    found: list[int] = []
    read = os.preadv

    def counted(descriptor: int, buffers: list, offset: int) -> int:
        found.append(len(buffers))
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    return found


REQUESTS = [
    [],
    [7],
    [3, 1, 2, 3, 2499, 0],
    list(range(ROWS)),
    list(range(ROWS - 1, -1, -1)),
    [5] * 40,
]


@pytest.mark.parametrize("cache_bytes", [0, 500, 10**9])
def test_rows_are_returned_in_the_requested_order_with_any_cache_size(path, cache_bytes) -> None:
    rows = open_rows(path, cache_bytes)
    for requested in [*REQUESTS, *REQUESTS]:
        assert torch.equal(rows.read(requested), WEIGHT[torch.tensor(requested, dtype=torch.long)])


def test_consecutive_rows_are_read_in_one_call(path, calls) -> None:
    rows = open_rows(path)
    rows.read([9, 8, 20, 10, 21])
    assert sorted(calls) == [2, 3]
    calls.clear()
    rows.read(range(ROWS))
    assert calls == [1024, 1024, 452]


def test_a_cached_row_is_not_read_again(path, calls) -> None:
    rows = open_rows(path, cache_bytes=10**6)
    rows.read([3, 4, 90])
    calls.clear()
    assert torch.equal(rows.read([90, 5, 3]), WEIGHT[[90, 5, 3]])
    assert calls == [1]


def test_changing_a_returned_row_does_not_change_the_cache(path) -> None:
    rows = open_rows(path, cache_bytes=10**6)
    for _ in range(2):
        rows.read([3]).zero_()
    assert torch.equal(rows.read([3]), WEIGHT[[3]])


def test_the_cache_stays_within_its_limit_and_evicts_the_least_recently_used_row(
    path, calls
) -> None:
    rows = open_rows(path, cache_bytes=10 * (4 * WIDTH + 250))
    for row in (0, *range(9), 0, *range(100, 108)):
        rows.read([row])
    assert len(rows._cache) == 10
    calls.clear()
    rows.read([0])  # was used again above
    assert calls == []
    rows.read([1])
    assert calls == [1]


def test_a_large_read_does_not_evict_cached_rows(path, calls) -> None:
    rows = open_rows(path, cache_bytes=100 * (4 * WIDTH + 250))
    rows.read([3])
    rows.read(range(ROWS))
    calls.clear()
    rows.read([3])
    assert calls == []


def test_threads_can_read_concurrently(path) -> None:
    rows = open_rows(path, cache_bytes=40 * (4 * WIDTH + 250))
    start = threading.Barrier(4)

    def work(seed: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        start.wait(60)
        found = []
        for _ in range(300):
            requested = torch.randint(60, (4,), generator=generator)
            found.append((rows.read(requested.tolist()), WEIGHT[requested]))
        return found

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(work, range(4)):
            assert all(torch.equal(got, expected) for got, expected in found)


@pytest.mark.parametrize("outside", [-1, ROWS])
def test_a_row_out_of_range_is_reported_without_reading(path, calls, outside) -> None:
    with pytest.raises(ValueError, match=rf"class ID {outside} is out of range 0 … 2499"):
        open_rows(path).read([0, outside])
    assert calls == []


def test_a_file_truncated_after_opening_is_reported(path) -> None:
    rows = open_rows(path)
    os.truncate(path, path.stat().st_size - 4 * WIDTH - 1)
    with pytest.raises(ValueError, match="ends within row 2498: copy the bundle again"):
        rows.read([2497, 2498])
