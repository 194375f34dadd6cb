"""The sizes of all measurements: for a GPU, and for tests of the same code on a CPU."""

from dataclasses import dataclass
from typing import Any

# Enough for the collectives and for checkpoints, whose results do not depend on the size.
_TINY_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
}
_TINY_BERT = {
    "model_type": "bert",
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


@dataclass(frozen=True)
class TaskSize:
    """The shapes of a training step: an encoder, its inputs and the classes.

    side: of square images, in pixels. tokens: per text.
    """

    encoder: dict[str, Any]
    classes: int
    batch: int
    side: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class RowsSize:
    """A head whose rows FusedSGD updates: `dtype` is a value of `head.dtype`, and `batch` the
    number of feature rows. memory_mib: see `ClassHead`."""

    dtype: str
    classes: int
    dim: int
    batch: int
    memory_mib: int = 512


@dataclass(frozen=True)
class Size:
    """The sizes of all measurements.

    losses: the losses of the correctness checks (None: all). tile_logits: the numbers of classes
    and rows for which the losses with tiles are compared. fused: heads with fused updates. seconds:
    the time for each measurement.
    """

    name: str
    losses: tuple[str, ...] | None
    tiny: TaskSize
    images: TaskSize
    texts: TaskSize
    head_dim: int
    head_classes: tuple[int, ...]
    head_rows: tuple[int, ...]
    tile_logits: tuple[int, int]
    fused: tuple[RowsSize, ...]
    serving_classes: tuple[int, ...]
    serving_rows: tuple[int, ...]
    traced_steps: int
    seconds: float


_TINY = TaskSize(_TINY_RESNET, classes=13, batch=12, side=16)

FULL = Size(
    name="full",
    losses=None,
    tiny=_TINY,
    # transformers' default configuration is ResNet-50.
    images=TaskSize({"model_type": "resnet"}, classes=1000, batch=256, side=224),
    texts=TaskSize(
        {"model_type": "bert", "vocab_size": 119_547}, classes=1000, batch=512, tokens=96
    ),
    head_dim=768,
    head_classes=(100_000, 1_000_000, 10_000_000),
    head_rows=(1024, 8192),
    tile_logits=(100_000, 4096),
    fused=(
        RowsSize("fp32", classes=1_000_000, dim=768, batch=8192),
        RowsSize("bf16", classes=1_000_000, dim=768, batch=8192),
        RowsSize("fp8", classes=1_000_000, dim=768, batch=8192),
        RowsSize("bf16", classes=10_000_000, dim=768, batch=1024),
        RowsSize("fp8", classes=100_000_000, dim=512, batch=1024),
    ),
    # The largest size of figure 3 in paper 002 is 2^18.5.
    serving_classes=(2**10, 2**14, 2**18, round(2**18.5), 10_000_000),
    serving_rows=(1, 32),
    traced_steps=8,
    seconds=8,
)
TOY = Size(
    name="toy",
    losses=("ce", "batch_ce"),
    tiny=_TINY,
    images=_TINY,
    texts=TaskSize(_TINY_BERT, classes=13, batch=12, tokens=8),
    head_dim=16,
    head_classes=(1000, 3000),
    head_rows=(32,),
    tile_logits=(1000, 32),
    fused=tuple(RowsSize(dtype, 1000, dim=16, batch=32) for dtype in ("fp32", "bf16", "fp8")),
    serving_classes=(100, 1000),
    serving_rows=(1, 4),
    traced_steps=2,
    seconds=0.1,
)
