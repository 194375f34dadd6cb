"""The random state of each rank: torch's on the CPU and on its device.

Nothing else is drawn from: the loader's numbers are keyed by (seed, sample), not by a state.
"""

import base64
import hashlib

import torch
from torch import Tensor

from trainer.checkpoints.find import Checkpoint
from trainer.world import World


def packed_random_state(world: World) -> str:
    """This rank's random state as text."""
    state = torch.get_rng_state()
    if world.device.type == "cuda":
        state = torch.cat([state, torch.cuda.get_rng_state(world.device)])
    return base64.b64encode(state.numpy().tobytes()).decode()


def restore_random_state(checkpoint: Checkpoint, world: World, *, seed: int) -> None:
    """Restore the generators whose state was stored; seed the others from (seed, step, rank)."""
    mixed = hashlib.sha256(f"{seed}/{checkpoint.step}/{world.rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(mixed[:8], "big") >> 1)  # of the CPU and every CUDA device
    states = stored_states(checkpoint, world)
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], world.device)


def stored_states(checkpoint: Checkpoint, world: World) -> dict[str, Tensor]:
    """The states that this rank restores, by device type. Empty at another world size; without
    CUDA if the checkpoint was written on CPUs."""
    if checkpoint.state["world_size"] != world.size:
        return {}
    packed = base64.b64decode(checkpoint.state["random_states"][world.rank])
    state = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    cpu, cuda = state.tensor_split([torch.get_rng_state().numel()])
    return {"cpu": cpu, "cuda": cuda} if len(cuda) and world.device.type == "cuda" else {"cpu": cpu}
