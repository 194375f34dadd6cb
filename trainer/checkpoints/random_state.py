"""The random state of each rank: torch's on the CPU and on its device.

Nothing else is drawn from: the loader's numbers are keyed by (seed, sample), not by a state.
"""

import base64
import hashlib

import torch

from trainer.checkpoints.find import Checkpoint
from trainer.world import World


def packed_random_state(world: World) -> str:
    """This rank's random state as text."""
    state = torch.get_rng_state()
    if world.device.type == "cuda":
        state = torch.cat([state, torch.cuda.get_rng_state(world.device)])
    return base64.b64encode(state.numpy().tobytes()).decode()


def restore_random_state(checkpoint: Checkpoint, world: World, *, seed: int) -> None:
    """This rank's random state; at another world size, one made from (seed, step, rank)."""
    states = checkpoint.state["random_states"]
    if checkpoint.state["world_size"] == world.size:
        packed = base64.b64decode(states[world.rank])
        state = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        cpu_bytes = torch.get_rng_state().numel()
        torch.set_rng_state(state[:cpu_bytes])
        if world.device.type == "cuda":
            torch.cuda.set_rng_state(state[cpu_bytes:], world.device)
    else:
        mixed = hashlib.sha256(f"{seed}/{checkpoint.step}/{world.rank}".encode()).digest()
        torch.manual_seed(int.from_bytes(mixed[:8], "big") >> 1)
