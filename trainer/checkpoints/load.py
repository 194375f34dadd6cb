"""Loads the tensors of a verified checkpoint at any world size, and restores the random state of
each rank.

The random state consists of the states of torch's generators on the CPU and on the rank's device.
The data loader is stateless: it derives its random numbers from (seed, sample).
"""

import base64
import hashlib
import warnings
from functools import partial

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from data.retry import is_transient, retried
from trainer.checkpoints.exchange import disk_failure
from trainer.checkpoints.find import Checkpoint
from trainer.world import World, random_state, set_random_state


def stored_shapes(checkpoint: Checkpoint) -> dict[str, torch.Size]:
    """Return the shapes of a checkpoint's tensors by name."""
    stored = _metadata(checkpoint).state_dict_metadata.items()
    return {name: entry.size for name, entry in stored if isinstance(entry, TensorStorageMetadata)}


def load_tensors(checkpoint: Checkpoint, entries: dict[str, Tensor], world: World) -> None:
    """Fill the tensors of `entries` from a checkpoint of any world size (collective).

    Raises ValueError, naming the tensor, if a tensor is missing from the checkpoint or has a
    different shape or dtype there, and OSError if a rank cannot read the checkpoint.
    """
    stored = _metadata(checkpoint)
    for name, tensor in entries.items():
        _check_matches(checkpoint, name, tensor, stored.state_dict_metadata.get(name))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or")
        try:
            dcp.load(
                entries,
                storage_reader=HuggingFaceStorageReader(str(checkpoint.folder)),
                process_group=world.group,
                no_dist=world.size == 1,
            )
        except CheckpointException as error:
            # DCP raises a BaseException with the traceback of every rank: report the first cause.
            rank, (cause, _) = next(iter(error.failures.items()))
            line = f"checkpoint {checkpoint.folder} could not be read on rank {rank}: {cause}"
            raise disk_failure(line, transient=is_transient(cause)) from None


def _metadata(checkpoint: Checkpoint) -> Metadata:
    for path in checkpoint.folder.glob("*.safetensors"):
        # Open each file first, because safetensors reports every failure to open a file as a
        # missing file, without an errno.
        retried(str(path), partial(path.open, "rb")).close()
    try:
        return HuggingFaceStorageReader(str(checkpoint.folder)).read_metadata()
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"checkpoint {checkpoint.folder} is unreadable: {error}") from None


def _check_matches(checkpoint: Checkpoint, name: str, tensor: Tensor, stored: object) -> None:
    known = stored if isinstance(stored, TensorStorageMetadata) else None
    if known is None or known.size != tensor.shape:
        stored_as = "does not exist" if known is None else f"has shape {list(known.size)}"
        raise ValueError(
            f"checkpoint {checkpoint.folder}: {name} has shape {list(tensor.shape)} in this run "
            f"but {stored_as} in the checkpoint: the recipe or the classes changed; use a new run "
            "folder"
        )
    if known.properties.dtype != tensor.dtype:  # a copy would round silently
        raise ValueError(
            f"checkpoint {checkpoint.folder}: {name} is {tensor.dtype} in this run but "
            f"{known.properties.dtype} in the checkpoint: the recipe changed; use a new run folder"
        )


def packed_random_state(world: World) -> str:
    """Return this rank's random state, base64-encoded."""
    state = torch.cat(random_state(world.device))
    return base64.b64encode(state.numpy().tobytes()).decode()


def restore_random_state(checkpoint: Checkpoint, world: World, *, seed: int) -> None:
    """Restore the generators whose state is stored, and seed the others from (seed, step, rank)."""
    mixed = hashlib.sha256(f"{seed}/{checkpoint.step}/{world.rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(mixed[:8], "big") >> 1)  # seeds the CPU and every CUDA device
    if states := stored_states(checkpoint, world):
        set_random_state(states, world.device)


def stored_states(checkpoint: Checkpoint, world: World) -> list[Tensor]:
    """Return the states of the generators on the CPU and on CUDA that this rank can restore. The
    result is empty if the world size differs. It has no CUDA state if the checkpoint was written on
    CPUs.
    """
    if checkpoint.state["world_size"] != world.size:
        return []
    packed = base64.b64decode(checkpoint.state["random_states"][world.rank])
    state = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    cpu, cuda = state.tensor_split([torch.get_rng_state().numel()])
    return [cpu, cuda] if len(cuda) and world.device.type == "cuda" else [cpu]
