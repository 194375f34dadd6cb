"""`examples/standing_queries.py` writes one line per frame and resumes after its last frame."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serving.client import Client
from tests.noise_images import image
from tests.serving.in_process import application, listening
from tests.system.processes import ROOT
from tests.tiny_bundle import NAMES, write
from tests.waiting import wait_until

CLASSES = [name for name in NAMES if name not in ("#3", "7")]
SCRIPT = ROOT / "examples" / "standing_queries.py"


@contextmanager
def running(url: str, frames: Path, hits: Path) -> Iterator[None]:
    command = [sys.executable, str(SCRIPT), url, str(frames), str(hits), *CLASSES]
    with subprocess.Popen(command) as process:
        try:
            yield
            assert process.poll() is None
        finally:
            process.kill()


def lines_of(hits: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in hits.read_text().splitlines()] if hits.exists() else []


def test_each_frame_gets_a_line_and_a_killed_process_resumes(tmp_path: Path) -> None:
    frames, hits = tmp_path / "frames", tmp_path / "hits.jsonl"
    frames.mkdir()
    for number in range(3):
        (frames / f"{number}.png").write_bytes(image(number))
    (frames / ".3.png").write_bytes(image(3)[:20])  # not complete
    with listening(application(write(tmp_path / "pets"))) as url:
        with running(url, frames, hits):
            wait_until(lambda: len(lines_of(hits)) == 3)
        with hits.open("a") as file:
            file.write('{"frame": "3.p')  # as if it had been killed in the middle of a line
        (frames / "3.png").write_bytes(image(3))
        (frames / "4.png").write_bytes(b"not an image")
        with running(url, frames, hits):
            wait_until(lambda: len(hits.read_text().splitlines()) == 5)
        found = lines_of(hits)
        with Client(url) as client:
            answer = client.query(CLASSES, [image(number) for number in range(4)], recall=0.9)
    assert [line["frame"] for line in found] == ["0.png", "1.png", "2.png", "3.png", "4.png"]
    for line, result in zip(found, answer.results, strict=False):
        matches = [one.class_name for one in result.verdicts if one.match]
        assert [hit["class"] for hit in line["hits"]] == matches
    assert any(line["hits"] for line in found[:4])
    assert "not an image" in found[4]["error"]
