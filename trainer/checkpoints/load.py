"""Reads the tensors of a verified checkpoint into a run of any world size."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from data.retry import is_transient, retried
from trainer.checkpoints.disk_error import failure
from trainer.checkpoints.find import Checkpoint
from trainer.world import World


def stored_shapes(checkpoint: Checkpoint) -> dict[str, torch.Size]:
    """The tensors of a checkpoint by name."""
    stored = _metadata(checkpoint).state_dict_metadata
    return {
        name: entry.size
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def load_tensors(checkpoint: Checkpoint, entries: dict[str, Tensor], world: World) -> None:
    """Fill `entries` in place from a checkpoint of any world size (collective).

    Raises ValueError naming a tensor that the checkpoint does not have, or has in another shape or
    type, OSError where a rank cannot read it.
    """
    stored = _metadata(checkpoint)
    for name, tensor in entries.items():
        _check_fits(checkpoint, name, tensor, stored.state_dict_metadata.get(name))
    with _single_process_is_meant():
        try:
            dcp.load(
                entries,
                storage_reader=HuggingFaceStorageReader(str(checkpoint.folder)),
                process_group=world.group,
                no_dist=world.size == 1,
            )
        except CheckpointException as error:
            # A BaseException with every rank's traceback; the first cause is what a person needs.
            rank, (cause, _) = next(iter(error.failures.items()))
            line = f"checkpoint {checkpoint.folder} could not be read on rank {rank}: {cause}"
            raise failure(line, transient=is_transient(cause)) from None


def _metadata(checkpoint: Checkpoint) -> Metadata:
    for path in checkpoint.folder.glob("*.safetensors"):
        # safetensors reports every file that it cannot open as missing, without an error number.
        retried(str(path), partial(_open, path))
    try:
        return HuggingFaceStorageReader(str(checkpoint.folder)).read_metadata()
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"checkpoint {checkpoint.folder} is unreadable: {error}") from None


def _open(path: Path) -> None:
    path.open("rb").close()


def _check_fits(checkpoint: Checkpoint, name: str, tensor: Tensor, stored: object) -> None:
    known = stored if isinstance(stored, TensorStorageMetadata) else None
    if known is None or known.size != tensor.shape:
        had = "no such tensor" if known is None else f"shape {list(known.size)}"
        raise ValueError(
            f"checkpoint {checkpoint.folder}: {name} has shape {list(tensor.shape)} in this "
            f"run and {had} there: the recipe or the classes changed; start another run folder"
        )
    if known.properties.dtype != tensor.dtype:  # a copy would round without a word
        raise ValueError(
            f"checkpoint {checkpoint.folder}: {name} is {tensor.dtype} in this run and "
            f"{known.properties.dtype} there: the recipe changed; start another run folder"
        )


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or")
        yield
