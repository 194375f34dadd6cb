"""Requests through the whole server, beside the application alone and the model alone.

The server is `kway serve` with one replica; what it is compared with runs with as many threads.
The machine's cores serve the client, too.
"""

import asyncio
import io
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.serving_bundles import write_random
from benchmarks.timing import Row, rate_row, take_turns
from serving.deploy.ports import free_port
from serving.model import Model

_CLIENTS, _REQUESTS, _CLASSES = 16, 2000, 100
_TRIVIAL = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8],
    "depths": [1],
    "layer_type": "basic",
}
_SMALL = {  # ResNet-18
    "model_type": "resnet",
    "hidden_sizes": [64, 128, 256, 512],
    "depths": [2, 2, 2, 2],
    "layer_type": "basic",
}
_SMALL_SIDE, _BATCH = 224, 8


def requests() -> Iterator[Row]:
    """Requests a second with next to no model."""
    with tempfile.TemporaryDirectory() as name:
        bundle = Path(name) / "bundle"
        write_random(bundle, _TRIVIAL, _CLASSES, size=8)
        health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with _kway(bundle) as kway, _alone("plain", bundle) as plain:
            found = take_turns(
                {"kway": _load(kway, health), "plain": _load(plain, health)},
                title="requests",
                seconds=60,
            )
        yield _rate("kway serve / uvicorn + FastAPI", "GET /health", found["kway"], found["plain"])
        query = _query(_picture(8))
        with _kway(bundle) as kway, _alone("application", bundle) as plain:
            found = take_turns(
                {"kway": _load(kway, query), "plain": _load(plain, query)},
                title="questions",
                seconds=60,
            )
        case = "a picture of 8 x 8, next to no model"
        yield _rate("kway serve / its application on uvicorn", case, found["kway"], found["plain"])


def batches() -> Iterator[Row]:
    """Pictures a second through the server, beside the backbone in a loop at the same batch."""
    with tempfile.TemporaryDirectory() as name:
        bundle = Path(name) / "bundle"
        write_random(bundle, _SMALL, _CLASSES, size=_SMALL_SIDE)
        picture, count = _picture(_SMALL_SIDE), 16 * _BATCH
        model = Model.open(bundle)
        prepared = [model.prepare(picture)] * _BATCH

        def loop() -> None:
            for _ in range(count // _BATCH):
                model.features(prepared)

        with _kway(bundle, "--batch-size", str(_BATCH)) as kway:
            found = take_turns(
                {"kway": _load(kway, _query(picture), count, 3 * _BATCH), "loop": loop},
                title="batches",
                seconds=120,
            )
    yield rate_row(
        "pictures through kway serve / the backbone alone in a loop",
        f"ResNet-18, batches of {_BATCH}, {torch.get_num_threads()} threads",
        found["kway"],
        found["loop"],
        at_least=0.85,
        count=count,
        unit="pictures/s",
    )


def _rate(what: str, case: str, ours: np.ndarray, theirs: np.ndarray) -> Row:
    where = f"{case}, {_CLIENTS} clients"
    return rate_row(what, where, ours, theirs, at_least=0.25, count=_REQUESTS, unit="requests/s")


def _picture(side: int) -> bytes:
    pixels = np.random.default_rng(0).integers(256, size=(side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def _query(picture: bytes) -> bytes:
    parts = [b'name="classes"\r\n\r\nspecies 1', b'name="images"; filename="a"\r\n\r\n' + picture]
    body = b"".join(b"--b\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts)
    body += b"--b--\r\n"
    return (
        b"POST /v1/query HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: %d\r\n\r\n" % len(body)
    ) + body


def _load(
    port: int, request: bytes, count: int = _REQUESTS, clients: int = _CLIENTS
) -> Callable[[], None]:
    """Ask `count` times in all, each of the `clients` on one connection, one after another."""

    async def client(times: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(times):
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"the server answered {head!r}")
            length = head.lower().split(b"content-length:")[1].split(b"\r\n")[0]
            await reader.readexactly(int(length))
            if b"connection: close" in head.lower():  # HAProxy makes way for another
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        await writer.wait_closed()

    async def load() -> None:
        shares = [len(range(place, count, clients)) for place in range(clients)]
        await asyncio.gather(*map(client, shares))

    return lambda: asyncio.run(load())


@contextmanager
def _kway(bundle: Path, *options: str) -> Iterator[int]:
    command = [sys.executable, "-P", "-m", "launch", "serve", str(bundle), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            ready = process.stdout.readline()
            if not ready.startswith("ready: "):
                raise RuntimeError("kway serve did not start: its error is above")
            yield int(ready.split()[1].rsplit(":", 1)[1])
        finally:
            process.terminate()


@contextmanager
def _alone(kind: str, bundle: Path) -> Iterator[int]:
    port = free_port("127.0.0.1", 0)
    command = [sys.executable, "-m", "benchmarks.serving_alone", kind, str(bundle), str(port)]
    with subprocess.Popen(command) as process:
        try:
            asyncio.run(_listens(port))
            yield port
        finally:
            process.terminate()


async def _listens(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionError:
                await asyncio.sleep(0.1)
                continue
            writer.close()
            return
