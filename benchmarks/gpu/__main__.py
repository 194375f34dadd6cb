"""Measure kway on one GPU: `python -m benchmarks.gpu [SECTION …] [--markdown FILE]`.

Rows are printed as they are measured. On one H100, all sections should take about 8 minutes. If the
time of a command is limited, use three commands: `images texts` and `fused`, 1.5 minutes each, and
the sections `head-CLASSES-ROWS`, 5 minutes. Without a GPU, the sizes are so small that the results
show only that the code runs.
"""

from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu import heads
from benchmarks.gpu.heads import RowsSize
from benchmarks.gpu.tasks import IMAGES, TEXTS, TaskSize
from benchmarks.timing import Sections, command_line, report
from benchmarks.trainer import compared
from tests.tiny_networks import TINY_BERT, TINY_RESNET


@dataclass(frozen=True)
class Sizes:
    """The sizes of all measurements. seconds: the time for each of them."""

    images: TaskSize
    texts: TaskSize
    dim: int
    heads: tuple[tuple[int, int], ...]  # classes, rows
    fused: tuple[RowsSize, ...]
    seconds: float


FULL = Sizes(
    # transformers' default configuration is ResNet-50.
    images=TaskSize({"model_type": "resnet"}, classes=1000, batch=256, side=224),
    texts=TaskSize(
        {"model_type": "bert", "vocab_size": 119_547}, classes=1000, batch=512, tokens=96
    ),
    dim=768,
    heads=tuple((k, b) for k in (100_000, 1_000_000, 10_000_000) for b in (1024, 8192)),
    fused=(
        *(RowsSize(dtype, 1_000_000, dim=768, batch=8192) for dtype in ("fp32", "bf16", "fp8")),
        RowsSize("bf16", 10_000_000, dim=768, batch=1024),
        RowsSize("fp8", 100_000_000, dim=512, batch=1024),
    ),
    seconds=8,
)
TOY = Sizes(
    images=TaskSize(TINY_RESNET, classes=13, batch=12, side=16),
    texts=TaskSize(TINY_BERT, classes=13, batch=12, tokens=8),
    dim=16,
    heads=((1000, 32),),
    fused=tuple(RowsSize(dtype, 1000, dim=16, batch=32) for dtype in ("fp32", "bf16", "fp8")),
    seconds=0.1,
)


def sections_of(sizes: Sizes, device: torch.device) -> Sections:
    """Return the sections, most valuable first."""
    seconds = sizes.seconds
    trainer = partial(compared, device=device, precision="bf16", seconds=2 * seconds)
    return {
        "images": partial(trainer, IMAGES, sizes.images),
        "texts": partial(trainer, TEXTS, sizes.texts),
        **{
            f"head-{classes}-{rows}": partial(
                heads.head, classes, rows, sizes.dim, device, seconds=seconds
            )
            for classes, rows in sizes.heads
        },
        "fused": partial(heads.fused, sizes.fused, device, seconds=seconds / 2),
    }


if __name__ == "__main__":
    has_gpu = torch.cuda.is_available()
    sections = sections_of(FULL if has_gpu else TOY, torch.device("cuda" if has_gpu else "cpu"))
    report(command_line("gpu", __doc__).parse_args(), sections)
