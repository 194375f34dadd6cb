"""Compares queries that compute one logit with queries that compute all logits, and measures the
forward pass that precedes them."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.measuring import measure
from benchmarks.gpu.sizes import Size
from benchmarks.gpu.tasks import IMAGES, recipe_of
from trainer.backbone.backbone import build_backbone
from trainer.bundle.row_file import RowFile, header_of

_NAME = "class_weights"


def serving(size: Size, device: torch.device, *, classes: int) -> dict[str, Any]:
    """Measure queries for one class of `classes`, for each batch size.

    `one_logit`: the rows are on the device. `one_row_of_a_file`: as in `kway serve`, the features
    are copied to the host, and the row is read from a file. `all_logits`: the product with all
    rows. Every query ends with a copy of the result to the host.
    """
    dim = size.head_dim
    weights = torch.empty(classes, dim, device=device).normal_(std=dim**-0.5)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        rows = _sparse_file(Path(folder) / "rows", classes, dim)
        found = [_queries(weights, rows, number, size) for number in size.serving_rows]
        rows.close()
    return {"classes": classes, "dim": dim, "queries": found}


def _queries(weights: Tensor, rows: RowFile, num_rows: int, size: Size) -> dict[str, Any]:
    device = weights.device
    features = torch.randn(num_rows, weights.shape[1], device=device)
    class_id = len(weights) // 2
    chosen = torch.tensor([class_id], device=device)
    times = measure(
        {
            "one_logit": lambda: (features @ weights[chosen].T).cpu(),
            "one_row_of_a_file": lambda: features.cpu() @ rows.read([class_id]).T,
            "all_logits": lambda: (features @ weights.T)[:, class_id].cpu(),
        },
        device,
        seconds=size.seconds / 4,
    )
    ratio = times["all_logits"]["seconds"] / times["one_logit"]["seconds"]
    return {"rows": num_rows, "all_over_one": ratio, **times}


def backbone(size: Size, device: torch.device) -> dict[str, Any]:
    """Measure the forward pass of ResNet-50 in float32, which precedes the head of a query."""
    shape = size.images
    recipe = recipe_of(IMAGES, shape, {})
    model = build_backbone(recipe.backbone, image=recipe.data.image).to(device).eval()
    found = []
    with torch.inference_mode():
        for rows in size.serving_rows:
            pixels = torch.randint(256, (rows, 3, shape.side, shape.side), dtype=torch.uint8)
            inputs = {"pixel_values": pixels.to(device)}
            time = measure({"forward": partial(model, inputs)}, device, seconds=size.seconds / 4)
            found.append({"rows": rows, **time["forward"]})
    return {"queries": found}


def _sparse_file(path: Path, classes: int, dim: int) -> RowFile:
    """Create a file of zero rows that takes no space on the disk. `pread` takes the same path in
    the kernel as for other files."""
    header = header_of(_NAME, classes, dim)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 4 * classes * dim)
    return RowFile(path, name=_NAME, num_rows=classes, width=dim)
