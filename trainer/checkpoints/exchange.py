"""What ranks tell each other about a checkpoint: small JSON messages, never pickled objects."""

import json
from typing import Any

import torch
from torch.distributed import ProcessGroup

from heads.collectives import all_gather_equal, all_gather_rows


def exchange(message: Any, group: ProcessGroup | None) -> list[Any]:
    """Every rank's message, in rank order (collective; on CPU tensors, so a gloo group serves)."""
    body = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    sizes = [int(size) for size in all_gather_equal(torch.tensor([len(body)]), group)]
    joined = all_gather_rows(body, sizes, group)
    return [json.loads(part.numpy().tobytes()) for part in joined.split(sizes)]
