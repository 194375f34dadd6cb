"""FSDP2: every rank stores a shard of each weight's rows, and gathers the weights of one block at a
time for the forward and backward passes.

With `shard_group`, each group of ranks stores a full copy of the backbone (hybrid sharding, HSDP):
weights are gathered within a group, and gradients are also summed over the groups.

With `param_dtype: bf16`, the shards, the gradients that the optimizer reads and the moments remain
float32. Each rank rounds its shard before it is gathered, so the forward and backward passes use
bf16 weights.
"""

from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from heads.collectives import all_reduce_sum, hook_pre_forward
from heads.dtensors import local, sharded_rows
from heads.gradients import sum_sharded_gradients
from trainer.backbone.batch_norm import BATCH_NORMS
from trainer.backbone.blocks import large_tables, repeated_blocks
from trainer.strategies.base import Sharding, Strategy, StrategyKind
from trainer.world import RankGroup, World, group_ranks

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class FSDP(StrategyKind):
    """FSDP2: the weights, gradients and moments of the backbone are sharded over all ranks, or over
    each `shard_group`.
    """

    kind: Literal["fsdp"] = "fsdp"
    reshard_after_forward: bool = Field(
        True,
        description="whether to free the weights of a block after the forward pass and gather them "
        "again in the backward pass",
    )

    shard_group: RankGroup = Field(
        "world",
        description="number of ranks that share one copy of the backbone; with several groups, "
        "gradients are also summed over the groups",
    )

    param_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="dtype in which weights are gathered and used; bf16 requires "
        "train.precision=bf16 and does not apply to batch norm",
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="dtype in which gradients are summed over ranks"
    )

    @property
    def label(self) -> str:
        changed = self.model_dump(exclude={"kind"}, exclude_defaults=True).items()
        options = ", ".join(f"{key}={str(value).lower()}" for key, value in changed)
        return f"{self.kind} ({options})" if options else self.kind

    @property
    def weight_precision(self) -> str | None:
        return None if self.param_dtype == "fp32" else self.param_dtype

    def shard_ranks(self, size: int, local_size: int) -> int:
        key = "train.strategy.shard_group"
        return group_ranks(self.shard_group, key=key, size=size, local_size=local_size)

    def start(self, backbone: nn.Module, world: World) -> Strategy:
        return FSDPStrategy(backbone, self, world)

    @property
    def sharding(self) -> Sharding:
        return Sharding(
            weights=True,
            gradients=True,
            updates=True,
            gathers_blocks=self.reshard_after_forward,
            regathers=self.reshard_after_forward,
            param_bytes=_DTYPES[self.param_dtype].itemsize,
            reduce_bytes=_DTYPES[self.reduce_dtype].itemsize,
        )

    def smaller(self) -> StrategyKind | None:
        if not self.reshard_after_forward:
            return self.model_copy(update={"reshard_after_forward": True})
        if self.shard_group != "world":
            return self.model_copy(update={"shard_group": "world"})
        return None


class FSDPStrategy(Strategy):
    """Applies torch's `fully_shard` to each block, to each large embedding table and to the
    remaining modules.

    The gradients of every micro-batch are reduced immediately. Deferring the reduction to the last
    micro-batch would keep unsharded gradients in memory. With several copies of the backbone, the
    shards of the gradients are summed over the copies only after the last micro-batch.

    The optimizer updates this rank's pieces as plain tensors, `trained`, which share the memory of
    the DTensors. torch 2.13 has no fused SGD for DTensors, and dispatching DTensor
    operations takes time on the host.
    """

    def __init__(self, backbone: nn.Module, config: FSDP, world: World) -> None:
        super().__init__(backbone)
        ranks = config.shard_ranks(world.size, world.local_size)
        both = world.create_mesh((world.size // ranks, ranks), ("replicate", "shard"))
        self._mesh, self._is_replicated = both["shard"], ranks < world.size
        _shard(backbone, config, both if self._is_replicated else self._mesh)
        self._modules = [module for module in backbone.modules() if isinstance(module, FSDPModule)]
        for module in self._modules:
            if not isinstance(module, BATCH_NORMS):  # see `_shard`
                hook_pre_forward(module, "all_gather")
        self._sharded = {  # fully_shard replaced the parameters
            name: p for name, p in backbone.named_parameters() if p.requires_grad
        }
        self.trained = {name: nn.Parameter(local(p.detach())) for name, p in self._sharded.items()}
        self._shapes = {name: p.shape for name, p in backbone.named_parameters()}
        sum_sharded_gradients(backbone)

    def forward(self, inputs: dict[str, Tensor], *, last: bool = True) -> Tensor:
        if self._is_replicated:
            for module in self._modules:
                module.set_requires_all_reduce(last, recurse=False)
        return super().forward(inputs)

    def gradients(self) -> list[Tensor]:
        for name, sharded in self._sharded.items():
            self.trained[name].grad = None if sharded.grad is None else local(sharded.grad)
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

    def live(self) -> dict[str, Tensor]:
        # A forward pass gathered weights, which become stale when the shards change.
        for module in self._modules:
            module.reshard()
        return {name: local(weight) for name, weight in super().live().items()}

    def canonical(self, name: str, piece: Tensor) -> Tensor:
        return sharded_rows(piece, self._mesh, self._shapes[name])

    def piece(self, name: str, canonical: Tensor) -> Tensor:
        return local(canonical)


def _shard(backbone: nn.Module, config: FSDP, mesh: DeviceMesh) -> None:
    """Apply `fully_shard` to the parts of a backbone (collective)."""
    reduce_dtype = _DTYPES[config.reduce_dtype]
    param_dtype = None if config.param_dtype == "fp32" else _DTYPES[config.param_dtype]
    norms = [module for module in backbone.modules() if isinstance(module, BATCH_NORMS)]
    if norms and param_dtype is not None:
        # The weights and the statistics of batch norm must have the same dtype. They are small, so
        # one unit for all layers, which remains gathered until backward, adds little traffic.
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        fully_shard(norms, mesh=mesh, reshard_after_forward=False, mp_policy=policy)  # type: ignore[arg-type]
    # Autocast chooses the dtype of activations, so FSDP must not cast the inputs of blocks.
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)
    shard = partial(
        fully_shard,
        mesh=mesh,
        reshard_after_forward=config.reshard_after_forward,
        mp_policy=policy,
    )
    encoder = backbone.get_submodule("encoder")
    for block in (*repeated_blocks(encoder), *large_tables(encoder)):
        if any(True for _ in block.parameters()):
            shard(block)
    shard(backbone)
