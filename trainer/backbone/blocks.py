"""The repeated blocks of an encoder: what is compiled, checkpointed and sharded one at a time."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import _dynamo as dynamo
from torch import nn
from torch.utils.checkpoint import checkpoint

# A smaller table costs less than a collective of its own.
_LARGE_TABLE = 1_000_000
# Sizes of pictures or texts, times training and evaluation; torch's own limit is for all blocks.
_SHAPES_A_BLOCK = 16


def repeated_blocks(encoder: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of modules: a transformer's layers, a ResNet's stages."""
    for child in encoder.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from repeated_blocks(child)


def large_tables(encoder: nn.Module) -> Iterator[nn.Module]:
    """Embeddings worth sharding and gathering by themselves: word pieces of many languages."""
    for module in encoder.modules():
        if isinstance(module, nn.Embedding) and module.weight.numel() >= _LARGE_TABLE:
            yield module


def compile_blocks(encoder: nn.Module) -> None:
    """Compile each block's `forward` in place, or that of an encoder without blocks.

    What wraps the blocks hooks on to their calls and stays outside; names of parameters stay too.
    """
    blocks = list(repeated_blocks(encoder)) or [encoder]
    for block in blocks:
        block.forward = torch.compile(block.forward)
    # Blocks share their code, and each may be compiled anew for some shapes and modes.
    limit = _SHAPES_A_BLOCK * len(blocks)
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, limit)


def checkpoint_blocks(encoder: nn.Module) -> None:
    """Make each block forget its activations and compute them again in backward, in place.

    Buffers that a forward updates, such as those of batch norm, are updated twice: the caller keeps
    what they were after the first.
    """
    for block in repeated_blocks(encoder):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
