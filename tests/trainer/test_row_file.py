"""Rows of class weights can be read in any order."""

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


def open_rows(path: Path) -> RowFile:
    return RowFile(path, name="weight", num_rows=ROWS, width=WIDTH)


REQUESTS = [
    [],
    [7],
    [3, 1, 2, 3, 2499, 0],
    list(range(ROWS)),
    list(range(ROWS - 1, -1, -1)),
    [5] * 40,
]


def test_rows_are_returned_in_the_requested_order(path) -> None:
    rows = open_rows(path)
    for requested in REQUESTS:
        assert torch.equal(rows.read(requested), WEIGHT[torch.tensor(requested, dtype=torch.long)])


def test_threads_can_read_concurrently(path) -> None:
    rows = open_rows(path)
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
def test_a_row_out_of_range_is_reported(path, outside) -> None:
    with pytest.raises(ValueError, match=rf"class ID {outside} is out of range 0 … 2499"):
        open_rows(path).read([0, outside])


def test_a_file_truncated_after_opening_is_reported(path) -> None:
    rows = open_rows(path)
    os.truncate(path, path.stat().st_size - 4 * WIDTH - 1)
    with pytest.raises(ValueError, match="ends within row 2498: copy the bundle again"):
        rows.read([2497, 2498])
