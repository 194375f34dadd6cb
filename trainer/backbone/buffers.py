"""A module's buffers, such as batch norm's statistics: which belong to its state, and putting them
back where a forward must leave no trace."""

import torch
from torch import Tensor, nn


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to a module's state, by name."""
    weights = {name for name, _ in module.named_parameters()}
    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if name not in weights}


def kept_buffers(module: nn.Module) -> list[Tensor]:
    """Copies of all buffers."""
    return [buffer.clone() for buffer in module.buffers()]


@torch.no_grad()
def restore_buffers(module: nn.Module, kept: list[Tensor]) -> None:
    """Make the buffers again what they were."""
    for buffer, before in zip(module.buffers(), kept, strict=True):
        buffer.copy_(before)
