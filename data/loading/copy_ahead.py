"""Batches on a GPU, each copied there while the one before it is computed with."""

from collections.abc import Iterator

import torch

from data.loading.batch import Batch


def copied_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """`batches` on `device`. On CUDA the next one is read and copied, on a stream of its own,
    before one is handed out; elsewhere they are handed on as they come.
    """
    if device.type != "cuda":
        yield from batches
        return
    copies = torch.cuda.Stream(device)
    ahead = _copied(batches, device, copies)
    while ahead is not None:
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(copies)
        for tensor in ahead.tensors():
            # Its memory may not be used again for a copy before what computes with it has ended.
            tensor.record_stream(computing)
        ready, ahead = ahead, _copied(batches, device, copies)
        yield ready


def _copied(
    batches: Iterator[Batch], device: torch.device, copies: torch.cuda.Stream
) -> Batch | None:
    batch = next(batches, None)
    if batch is None:
        return None
    with torch.cuda.stream(copies):
        return batch.to(device)
