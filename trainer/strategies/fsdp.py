"""FSDP2: every rank stores a shard of each weight's rows, and gathers the weights of one block at a
time for the forward and backward passes.

With `shard_group`, each group of ranks stores a full copy of the backbone (hybrid sharding, HSDP):
weights are gathered within a group, and gradients are also summed over the groups.
"""

from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from heads.collectives import all_reduce_sum, hook_pre_forward
from heads.dtensors import local, sharded_rows
from heads.gradients import sum_sharded_gradients
from trainer.backbone.blocks import large_tables, repeated_blocks
from trainer.optimizers import tensors_of
from trainer.strategies.base import Sharding, Strategy, StrategyKind
from trainer.world import RankGroup, World, group_ranks


class FSDP(StrategyKind):
    """FSDP2: the weights, gradients and moments of the backbone are sharded over all ranks, or over
    each `shard_group`.
    """

    kind: Literal["fsdp"] = "fsdp"
    shard_group: RankGroup = Field(
        "world",
        description="number of ranks that share one copy of the backbone; with several groups, "
        "gradients are also summed over the groups",
    )

    @property
    def label(self) -> str:
        group = self.shard_group
        return self.kind if group == "world" else f"{self.kind} (shard_group={group})"

    def shard_ranks(self, size: int, local_size: int) -> int:
        key = "train.strategy.shard_group"
        return group_ranks(self.shard_group, key=key, size=size, local_size=local_size)

    def start(self, backbone: nn.Module, world: World) -> Strategy:
        return FSDPStrategy(backbone, self, world)

    @property
    def sharding(self) -> Sharding:
        return Sharding(weights=True, gradients=True, updates=True, gathers_blocks=True)

    def smaller(self) -> StrategyKind | None:
        return None if self.shard_group == "world" else FSDP()


class FSDPStrategy(Strategy):
    """Applies torch's `fully_shard` to each block, to each large embedding table and to the
    remaining modules.

    The gradients of every micro-batch are reduced immediately. Deferring the reduction to the last
    micro-batch would keep unsharded gradients in memory. With several copies of the backbone, the
    shards of the gradients are summed over the copies only after the last micro-batch.

    The optimizer updates this rank's pieces as plain tensors, `parameters`, which share the memory
    of the DTensors. torch 2.13 has no fused SGD for DTensors, and dispatching DTensor
    operations takes time on the host.
    """

    def __init__(self, backbone: nn.Module, config: FSDP, world: World) -> None:
        super().__init__(backbone)
        ranks = config.shard_ranks(world.size, world.local_size)
        both = world.create_mesh((world.size // ranks, ranks), ("replicate", "shard"))
        self._mesh, self._is_replicated = both["shard"], ranks < world.size
        _shard(backbone, both if self._is_replicated else self._mesh)
        self._modules = [module for module in backbone.modules() if isinstance(module, FSDPModule)]
        for module in self._modules:
            hook_pre_forward(module, "all_gather")
        self._sharded = {  # fully_shard replaced the parameters
            name: p for name, p in backbone.named_parameters() if p.requires_grad
        }
        self.parameters = [nn.Parameter(local(p.detach())) for p in self._sharded.values()]
        sum_sharded_gradients(backbone)

    def forward(self, inputs: dict[str, Tensor], *, last: bool = True) -> Tensor:
        if self._is_replicated:
            for module in self._modules:
                module.set_requires_all_reduce(last, recurse=False)
        return super().forward(inputs)

    def gradients(self) -> list[Tensor]:
        for piece, sharded in zip(self.parameters, self._sharded.values(), strict=True):
            piece.grad = None if sharded.grad is None else local(sharded.grad)
        return super().gradients()

    def step(self) -> None:
        self.gradients()
        super().step()

    def zero_gradients(self) -> None:
        super().zero_gradients()
        for sharded in self._sharded.values():
            sharded.grad = None

    def squared_gradient_norm(self) -> Tensor:
        return all_reduce_sum(super().squared_gradient_norm(), self._mesh.get_group())

    def weights(self) -> dict[str, Tensor]:
        self._free_gathered_weights()
        return {
            name: self.canonical(name, local(weight)) for name, weight in super().weights().items()
        }

    def moments(self) -> dict[str, dict[str, Tensor]]:
        self._free_gathered_weights()
        return {
            name: {
                key: self.canonical(name, moment) if moment.ndim else moment
                for key, moment in tensors_of(self.optimizer, piece).items()
            }
            for name, piece in zip(self._sharded, self.parameters, strict=True)
        }

    def live(self) -> dict[str, Tensor]:
        self._free_gathered_weights()
        return {name: local(weight) for name, weight in super().weights().items()}

    def canonical(self, name: str, piece: Tensor) -> Tensor:
        like = self.backbone.get_parameter(name)
        assert isinstance(like, DTensor)
        return sharded_rows(piece, self._mesh, like.shape)

    def piece(self, name: str, canonical: Tensor) -> Tensor:
        return local(canonical)

    def _free_gathered_weights(self) -> None:
        """Free weights gathered by a forward pass, because they become stale when the shards
        change.
        """
        for module in self._modules:
            module.reshard()


def _shard(backbone: nn.Module, mesh: DeviceMesh) -> None:
    """Apply `fully_shard` to the parts of a backbone (collective)."""
    # Autocast chooses the dtype of activations, so FSDP must not cast the inputs of blocks.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    encoder = backbone.get_submodule("encoder")
    for block in (*repeated_blocks(encoder), *large_tables(encoder)):
        if any(True for _ in block.parameters()):
            shard(block)
    shard(backbone)
