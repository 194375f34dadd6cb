"""Runs docs/tutorial.py with a few images and a few steps."""

import subprocess
import sys
from pathlib import Path

import pytest

from docs.tutorial import draw_images

SCRIPT = Path(__file__).parents[1] / "docs" / "tutorial.py"


@pytest.mark.slow
def test_the_tutorial_compares_two_heads_exports_one_and_queries_it(tmp_path):
    images = tmp_path / "images"
    draw_images(images, per_class=4)
    command = [sys.executable, SCRIPT, images, "--out", "out", "--epochs", "1"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    header = lines.index("loss          top-1    AUPRC  P@R 0.9")
    measured = {
        line.split()[0]: [float(word.removesuffix("%")) for word in line.split()[1:]]
        for line in lines[header + 1 : header + 3]
    }
    assert measured.keys() == {"ce", "batch_ce"}
    assert all(0 <= measure <= 100 for row in measured.values() for measure in row)
    (query,) = [line for line in lines if line.startswith("$ kway query out/bundle --class")]
    assert query.endswith("images/green ellipse 1/0.png'")
    assert (tmp_path / "out" / "bundle" / "bundle.json").is_file()
