"""DeepSpeed's ZeRO stages 1 to 3 behind the same interface, with torch's own optimizers. Stage 0,
plain data parallelism, is torch's DDP.

The DeepSpeed configuration is generated from the recipe; there is no separate file. torch's
autocast sets the precision. The trainer scales the loss. It also clips the gradients, because their
norm includes the head's shards. Checkpoints store tensors in canonical form: they are gathered one
at a time from DeepSpeed's flat pieces.
"""

import logging
import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from heads.collectives import all_gather_equal, all_reduce_sum
from heads.dtensors import full_tensor, sharded_rows
from heads.weights import shard_range
from trainer.strategies.base import Sharding, Strategy, StrategyKind
from trainer.strategies.ddp import DDPStrategy
from trainer.strategies.private_deepspeed import (
    disable_shared_memory_collectives,
    flat_pieces,
    link_moments,
    reduced_gradients,
    release_gathered_weights,
    set_weight_or_moment,
    weight_piece,
)
from trainer.world import World

_NEVER = 1_000_000_000
_BUCKET = 500_000_000  # DeepSpeed's default number of gradients in a bucket


class DeepSpeed(StrategyKind):
    """DeepSpeed ZeRO. Stage 0 shards nothing, stage 1 shards the optimizer moments, stage 2 also
    shards the gradients, and stage 3 also shards the weights.
    """

    can_defer: ClassVar[bool] = False

    kind: Literal["deepspeed"] = "deepspeed"
    stage: Literal[0, 1, 2, 3] = 2

    @property
    def label(self) -> str:
        return f"deepspeed stage {self.stage}"

    def start(self, backbone: nn.Module, world: World) -> Strategy:
        return DeepSpeedStrategy(backbone, self, world) if self.stage else DDPStrategy(backbone)

    @property
    def sharding(self) -> Sharding:
        return Sharding(
            weights=self.stage == 3,
            gradients=self.stage >= 2,
            updates=self.stage >= 1,
            copies_updates=self.stage >= 1,
            bucket=_BUCKET if self.stage else sys.maxsize,
            keeps_bucket=self.stage in (0, 3),
        )

    def smaller(self) -> StrategyKind | None:
        return None if self.stage == 3 else DeepSpeed.model_validate({"stage": self.stage + 1})


class DeepSpeedStrategy(Strategy):
    """`deepspeed.initialize` applied to the backbone and its optimizer."""

    def __init__(self, backbone: nn.Module, config: DeepSpeed, world: World) -> None:
        super().__init__(backbone)
        self.stage, self._world = config.stage, world
        self._names = dict(backbone.named_parameters())
        self._numel = sum(parameter.numel() for parameter in self._names.values())
        self._shapes = {name: parameter.shape for name, parameter in self._names.items()}
        self._mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))

    def attach(self, optimizer: Optimizer) -> None:
        super().attach(optimizer)
        deepspeed = _import_quietly(self._world)
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        self._engine, *_ = deepspeed.initialize(
            model=self.backbone,
            optimizer=optimizer,
            config=_settings(self.stage, self._world, numel=self._numel),
            dist_init_required=False,
        )
        self._zero: Any = self._engine.optimizer

    def forward(self, inputs: dict[str, Tensor], *, last: bool = True) -> Tensor:
        self._engine.set_gradient_accumulation_boundary(last)
        features: Tensor = self._engine(inputs)
        return features

    def backward(self, features: Tensor, gradient: Tensor) -> None:
        # The engine needs a scalar loss: the gradient of this sum with respect to `features` is
        # `gradient`. Multiply by the world size because the engine averages over the ranks.
        self._engine.backward((features * (gradient * self._world.size)).sum())

    def gradients(self) -> list[Tensor]:
        return reduced_gradients(self._zero)

    def squared_gradient_norm(self) -> Tensor:
        return all_reduce_sum(super().squared_gradient_norm(), self._world.group)

    def step(self) -> None:
        self._engine.step()

    def zero_gradients(self) -> None:
        """Clear the gradients. If a step was skipped, make DeepSpeed detect an overflow, because
        only its own overflow handling resets all of its internal state. After a step there are no
        gradients to clear.
        """
        gradients = self.gradients()
        if gradients:
            for gradient in gradients:
                gradient.fill_(torch.inf)
            self._engine.step()
            for gradient in gradients:  # the padding of a piece is never overwritten
                gradient.zero_()

    # ---- checkpoints ----

    def create_moments(self) -> None:
        groups = self.optimizer.param_groups
        saved = [(group["lr"], group["params"]) for group in groups]
        for number, flat in flat_pieces(self._zero, self.stage):
            for group in groups:
                group["params"], group["lr"] = [], 0.0
            groups[number]["params"] = [flat]
            flat.grad = torch.zeros_like(flat)
            self.optimizer.step()
            flat.grad = None
        for group, (rate, parameters) in zip(groups, saved, strict=True):
            group["lr"], group["params"] = rate, parameters

    def moments(self) -> dict[str, dict[str, Tensor]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        scalars, names = self._state_names()
        self._link_moments()
        return {
            name: {key: value.clone() for key, value in scalars.items()}
            | {
                key: self._sharded(safe_get_full_optimizer_state(parameter, key).view(shape))
                for key in names
            }
            for (name, parameter), shape in zip(
                self._names.items(), self._shapes.values(), strict=True
            )
        }

    def restore(
        self, weights: Mapping[str, Tensor], moments: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        self._link_moments()
        for name, parameter in self._names.items():
            self._set(name, parameter, weights[name], None)
            for key, value in moments.get(name, {}).items():
                if value.ndim:
                    self._set(name, parameter, value, key)
                else:
                    self._set_scalar(key, value)

    def _set(
        self, name: str, parameter: nn.Parameter, canonical: Tensor, moment: str | None
    ) -> None:
        """Copy a weight or one of its moments to where DeepSpeed stores it (collective)."""
        if self.stage < 3:
            set_weight_or_moment(parameter, full_tensor(canonical), moment)
            return
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        # DeepSpeed's setters for full tensors fail if the size is not divisible by the number of
        # ranks.
        piece = self.piece(name, canonical)
        if moment is None:
            safe_set_local_fp32_param(parameter, piece)
            weight_piece(parameter).copy_(piece)
        else:
            safe_set_local_optimizer_state(parameter, piece, moment)

    # ---- averaging ----

    def live(self) -> dict[str, Tensor]:
        if self.stage < 3:
            return super().live()
        release_gathered_weights(self._zero)
        return {name: weight_piece(p).detach() for name, p in self._names.items()}

    def canonical(self, name: str, piece: Tensor) -> Tensor:
        if self.stage < 3:
            return piece
        shape = self._shapes[name]
        flat = torch.cat([part.flatten() for part in all_gather_equal(piece, self._world.group)])
        return self._sharded(flat[: shape.numel()].view(shape))

    def piece(self, name: str, canonical: Tensor) -> Tensor:
        if self.stage < 3:
            return canonical
        numel = weight_piece(self._names[name]).numel()
        flat = full_tensor(canonical).flatten()
        begin = min(numel * self._world.rank, len(flat))
        mine = flat[begin : begin + numel]
        return torch.cat([mine, mine.new_zeros(numel - len(mine))])

    def close(self) -> None:
        engine, self._zero = self._engine, None
        del self._engine
        engine.destroy()

    # ---- the optimizer's state ----

    def _state_names(self) -> tuple[dict[str, Tensor], list[str]]:
        """Return the zero-dimensional tensors of the optimizer's state and the names of the other
        tensors.
        """
        for _, flat in flat_pieces(self._zero, self.stage):
            state = self.optimizer.state.get(flat, {})
            tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            if tensors:
                scalars = {key: value for key, value in tensors.items() if not value.ndim}
                return scalars, [key for key, value in tensors.items() if value.ndim]
        return {}, []

    def _link_moments(self) -> None:
        if self.stage == 3:
            return
        flats = dict(flat_pieces(self._zero, self.stage))
        for parameter in self._names.values():
            link_moments(parameter, flats, self.optimizer.state)

    def _set_scalar(self, key: str, value: Tensor) -> None:
        for _, flat in flat_pieces(self._zero, self.stage):
            self.optimizer.state[flat][key].copy_(value)

    def _sharded(self, tensor: Tensor) -> DTensor:
        begin, end = shard_range(len(tensor), self._world.rank, self._world.size)
        return sharded_rows(tensor[begin:end].clone(), self._mesh, tensor.shape)


def _import_quietly(world: World) -> Any:
    if world.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read on import; the default is a GPU
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor`"
    )
    disable_shared_memory_collectives(deepspeed)
    return deepspeed


def _settings(stage: int, world: World, *, numel: int) -> dict[str, Any]:
    """Return the DeepSpeed configuration. It leaves batch sizes, precision, learning rates and
    clipping to the trainer.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": world.size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": _NEVER,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            # DeepSpeed allocates the full bucket even for a small network.
            "reduce_bucket_size": min(_BUCKET, numel),
            # Shard small weights too; by default they are replicated on every rank.
            "stage3_param_persistence_threshold": 0,
        },
    }
