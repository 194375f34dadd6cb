"""FSDP2: every rank stores a shard of each weight's rows, and gathers the weights of one block at a
time for the forward and backward passes.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from heads import sum_sharded_gradients
from heads.collectives import all_reduce_sum
from heads.dtensors import local, sharded_rows
from trainer.backbone.blocks import large_tables, repeated_blocks
from trainer.optimizers import tensors_of
from trainer.strategies.base import Strategy, StrategyKind
from trainer.strategies.cost import FLOAT32, Shapes, Spread, gathered, padded_numel, scattered

if TYPE_CHECKING:
    from trainer.backbone.backbone import Backbone
    from trainer.world import World


class FSDP(StrategyKind):
    """FSDP2: the weights, gradients and moments of the backbone are sharded over all ranks."""

    weights_are_dtensors: ClassVar[bool] = True

    kind: Literal["fsdp"] = "fsdp"
    reshard_after_forward: bool = Field(
        True,
        description="whether to free the weights of a block after the forward pass and gather them "
        "again in the backward pass",
    )

    def start(self, backbone: "Backbone", world: "World") -> Strategy:
        return FSDPStrategy(backbone, self, world)

    def spread(self, units: Sequence[Shapes], ranks: int, *, passes: int, parts: int) -> Spread:
        padded = [padded_numel(unit, ranks) * FLOAT32 for unit in units]
        piece, again = sum(padded) // ranks, self.reshard_after_forward
        # With resharding, the root, the current block and the prefetched next block are in memory;
        # without resharding, all weights are in memory from forward until backward.
        largest = sorted(padded[:-1], reverse=True)[:2]
        whole = padded[-1] + sum(largest) if again else sum(padded)
        # A block's unsharded gradients and their copy, which is the input of the reduction.
        whole += 2 * max(padded)
        collectives = [
            gathered("FSDP: weights", sum(padded), "forward", passes if again else parts),
            *([gathered("FSDP: weights again", sum(padded), "backward", parts)] if again else []),
            scattered("FSDP: gradients", sum(padded), parts),
        ]
        return Spread(piece, piece, piece, 0, whole, tuple(collectives))

    def smaller(self, *, whole_tensors: bool) -> StrategyKind | None:
        return None if self.reshard_after_forward else FSDP()


class FSDPStrategy(Strategy):
    """Applies torch's `fully_shard` over all ranks to each block, to each large embedding table and
    to the remaining modules.

    The gradients of every micro-batch are reduced immediately. Deferring the reduction to the last
    micro-batch would keep unsharded gradients in memory.

    The optimizer updates this rank's pieces as plain tensors, `parameters`, which share the memory
    of the DTensors. torch 2.13 has no fused SGD for DTensors, and dispatching DTensor
    operations takes time on the host.
    """

    def __init__(self, backbone: "Backbone", config: FSDP, world: "World") -> None:
        super().__init__(backbone)
        self._group = world.group
        mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
        shard = partial(fully_shard, mesh=mesh, reshard_after_forward=config.reshard_after_forward)
        for block in (*repeated_blocks(backbone.encoder), *large_tables(backbone.encoder)):
            if any(True for _ in block.parameters()):
                shard(block)
        shard(backbone)
        self.shard_group = mesh.get_group()
        self._sharded = {  # fully_shard replaced the parameters
            name: p for name, p in backbone.named_parameters() if p.requires_grad
        }
        self.parameters = [nn.Parameter(local(p.detach())) for p in self._sharded.values()]
        sum_sharded_gradients(backbone)

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
        return all_reduce_sum(super().squared_gradient_norm(), self._group)

    def weights(self) -> dict[str, Tensor]:
        self._free_gathered_weights()
        return super().weights()

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
        return {name: local(weight) for name, weight in self.weights().items()}

    def canonical(self, name: str, piece: Tensor) -> Tensor:
        like = self.backbone.get_parameter(name)
        assert isinstance(like, DTensor)
        return sharded_rows(piece, like.device_mesh, like.shape)

    def piece(self, name: str, canonical: Tensor) -> Tensor:
        return local(canonical)

    def _free_gathered_weights(self) -> None:
        """Free weights gathered by a forward pass, because they become stale when the shards
        change.
        """
        for module in self._modules():
            module.reshard()

    def _modules(self) -> list[FSDPModule]:
        return [module for module in self.backbone.modules() if isinstance(module, FSDPModule)]
