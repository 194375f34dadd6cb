"""Requests through the complete server compared with the application alone and the model alone.

The server is `kway serve` with one replica, and its peers use the same number of threads. The
client runs on the same cores.
"""

import asyncio
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.serving_bundles import write_random
from benchmarks.serving_started import kway, module
from benchmarks.timing import Row, rate_row, take_turns
from serving.model import Model

_CLIENTS, _REQUESTS, _CLASSES = 16, 2000, 100
_ALONE = "benchmarks.serving_alone"
TRIVIAL = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8],
    "depths": [1],
    "layer_type": "basic",
}
SMALL = {  # ResNet-18
    "model_type": "resnet",
    "hidden_sizes": [64, 128, 256, 512],
    "depths": [2, 2, 2, 2],
    "layer_type": "basic",
}
SMALL_SIDE, _BATCH = 224, 8


def requests() -> Iterator[Row]:
    """Measure requests/s with a negligible model."""
    with tempfile.TemporaryDirectory() as name:
        bundle = Path(name) / "bundle"
        write_random(bundle, TRIVIAL, _CLASSES, size=8)
        health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with kway(bundle) as ours, module(_ALONE, "plain", bundle) as plain:
            found = take_turns(
                {"kway": load(ours.port, health), "plain": load(plain.port, health)},
                title="requests",
                seconds=60,
            )
        yield _rate("kway serve / uvicorn + FastAPI", "GET /health", found["kway"], found["plain"])
        query = _query(random_jpeg(8))
        with kway(bundle) as ours, module(_ALONE, "application", bundle) as plain:
            found = take_turns(
                {"kway": load(ours.port, query), "plain": load(plain.port, query)},
                title="queries",
                seconds=60,
            )
        case = "an image of 8 x 8, negligible model"
        yield _rate("kway serve / its application on uvicorn", case, found["kway"], found["plain"])


def batches() -> Iterator[Row]:
    """Compare images/s through the server with a loop over the backbone at the same batch size."""
    with tempfile.TemporaryDirectory() as name:
        bundle = Path(name) / "bundle"
        write_random(bundle, SMALL, _CLASSES, size=SMALL_SIDE)
        jpeg, count = random_jpeg(SMALL_SIDE), 16 * _BATCH
        model = Model.open(bundle)
        prepared = [model.prepare(jpeg)] * _BATCH

        def loop() -> None:
            for _ in range(count // _BATCH):
                model.features(prepared)

        with kway(bundle, "--batch-size", str(_BATCH)) as ours:
            found = take_turns(
                {"kway": load(ours.port, _query(jpeg), count, 3 * _BATCH), "loop": loop},
                title="batches",
                seconds=120,
            )
    yield rate_row(
        "images through kway serve / the backbone alone in a loop",
        f"ResNet-18, batches of {_BATCH}, {torch.get_num_threads()} threads",
        found["kway"],
        found["loop"],
        at_least=0.85,
        count=count,
        unit="images/s",
    )


def _rate(what: str, case: str, ours: np.ndarray, theirs: np.ndarray) -> Row:
    label = f"{case}, {_CLIENTS} clients"
    return rate_row(what, label, ours, theirs, at_least=0.25, count=_REQUESTS, unit="requests/s")


def random_jpeg(side: int) -> bytes:
    """Return a JPEG file of random pixels."""
    pixels = np.random.default_rng(0).integers(256, size=(side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def _query(file: bytes) -> bytes:
    parts = [b'name="classes"\r\n\r\nspecies 1', b'name="images"; filename="a"\r\n\r\n' + file]
    body = b"".join(b"--b\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts)
    body += b"--b--\r\n"
    return (
        b"POST /v1/query HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: %d\r\n\r\n" % len(body)
    ) + body


def load(
    port: int,
    request: bytes,
    count: int = _REQUESTS,
    clients: int = _CLIENTS,
    *,
    latencies: list[float] | None = None,
) -> Callable[[], None]:
    """Return a function that sends `count` requests in total and appends to `latencies` how many
    seconds each of them took.

    Each of the `clients` sends its requests sequentially over one connection.
    """
    taken = [] if latencies is None else latencies

    async def client(times: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(times):
            started = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"the server did not respond with status 200: {head!r}")
            length = head.lower().split(b"content-length:")[1].split(b"\r\n")[0]
            await reader.readexactly(int(length))
            taken.append(time.perf_counter() - started)
            if b"connection: close" in head.lower():  # HAProxy is reloading
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        await writer.wait_closed()

    async def all_clients() -> None:
        shares = [len(range(index, count, clients)) for index in range(clients)]
        await asyncio.gather(*map(client, shares))

    return lambda: asyncio.run(all_clients())
