"""Loader processes that need more shared memory than the machine has."""

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
from data.config import DataConfig
from data.images.config import ImageConfig
from data.loading.batch import Cursor
from data.loading.loader import TrainLoader
from data.shards.split import open_split

config = DataConfig(shards=sys.argv[1], image=ImageConfig(size=512), workers=1)
with open_split(config.shards, "train") as split:
    try:
        next(TrainLoader(split, config, global_batch=8, cursor=Cursor(0)))
    except ValueError as error:
        print(error)
"""


def test_a_small_shared_memory_is_one_line(shards: Path) -> None:
    small = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", small, "-"]
    tried = subprocess.run([*command, "true"], capture_output=True, check=False, timeout=60)
    if tried.returncode:
        pytest.skip("needs root to mount a file system")
    run = [*command, sys.executable, "-c", CODE, str(shards)]
    root = Path(__file__).parents[2]
    done = subprocess.run(run, capture_output=True, text=True, timeout=200, cwd=root, check=True)
    assert done.stdout == (
        "/dev/shm is too small for the batches of the loader processes: raise --shm-size (or the "
        "sizeLimit of the volume at /dev/shm), or lower data.workers\n"
    )
