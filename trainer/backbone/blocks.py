"""The repeated blocks of an encoder, which are compiled, checkpointed and sharded individually."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

# Minimum number of elements. For a smaller table, a separate collective costs more than it saves.
_LARGE_TABLE = 1_000_000
# Maximum number of compiled variants per block. Each image size or text length needs one for
# training and one for evaluation. torch's own limit applies to all blocks together.
_SHAPES_PER_BLOCK = 16


def repeated_blocks(encoder: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of the outermost module lists: the layers of a transformer, the stages of a
    ResNet."""
    for child in encoder.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from repeated_blocks(child)


def large_tables(encoder: nn.Module) -> Iterator[nn.Module]:
    """Yield the embeddings that are large enough to shard and gather separately, such as those of
    multilingual vocabularies.
    """
    for module in encoder.modules():
        if isinstance(module, nn.Embedding) and module.weight.numel() >= _LARGE_TABLE:
            yield module


def compile_blocks(encoder: nn.Module) -> None:
    """Replace the `forward` of each block, or of an encoder without blocks, with a compiled
    version.

    Compiling `forward` instead of the module preserves the parameter names and keeps the hooks of
    wrappers such as FSDP outside the compiled code.
    """
    blocks = list(repeated_blocks(encoder)) or [encoder]
    for block in blocks:
        block.forward = torch.compile(block.forward)
    # The recompile limit applies per code object, which all blocks share. Each block may be
    # compiled for several shapes and modes.
    limit = _SHAPES_PER_BLOCK * len(blocks)
    config = torch.compiler.config
    config.recompile_limit = max(config.recompile_limit, limit)


def checkpoint_blocks(encoder: nn.Module) -> None:
    """Enable activation checkpointing in each block, so that activations are recomputed in
    backward.

    Buffers that the forward pass updates, such as those of batch norm, are updated twice. The
    caller must restore the values that they had after the first forward pass.
    """
    for block in repeated_blocks(encoder):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
