"""The interface of strategies. The base class `Strategy` implements it for a single process.

Gradients are summed over ranks, not averaged: the head already returns gradients of the mean over
the global batch. A strategy's tensors are either full weights or this rank's pieces of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from data.base_config import FrozenConfig
from heads.gradients import squared_norm
from trainer.optimizers import create_moments_of, tensors_of
from trainer.world import World


class Sharding(NamedTuple):
    """What a strategy shards over the ranks of `StrategyKind.shard_ranks`; `kway plan` derives
    memory and traffic from it.

    weights, gradients, updates: whether a rank stores only its piece of the weights, of their
    gradients, and of what the optimizer updates (weights and moments). copies_updates: whether the
    updated piece is a second copy of the weights. bucket: how many gradients are copied at most to
    sum them; keeps_bucket: whether these copies persist between steps. gathers_blocks: whether
    sharded weights are gathered block by block, instead of all at once. regathers: whether the
    backward pass gathers them again. param_bytes, reduce_bytes: bytes per gathered weight and per
    summed gradient.
    """

    weights: bool = False
    gradients: bool = False
    updates: bool = False
    copies_updates: bool = False
    bucket: int = 0
    keeps_bucket: bool = False
    gathers_blocks: bool = False
    regathers: bool = False
    param_bytes: int = 4
    reduce_bytes: int = 4


class StrategyKind(FrozenConfig, ABC):
    """Options of a strategy. A subclass adds `kind: Literal[...]` and its own options.

    To add a strategy, write the subclass and its `Strategy` in one file and add it to
    `__init__.py`.
    """

    # Whether weights keep their memory format (channels_last).
    keeps_memory_format: ClassVar[bool] = False
    # Whether `Strategy.step` has no effect if the optimizer's `found_inf` is set; see
    # `trainer/step.py`.
    can_defer: ClassVar[bool] = True

    kind: str

    def shard_ranks(self, size: int, local_size: int) -> int:
        """Return the number of consecutive ranks that share one copy of what the strategy shards,
        in a run of `size` ranks, `local_size` of them per machine. Raises ValueError if it does not
        divide `size`.
        """
        del local_size
        return size

    @property
    def weight_precision(self) -> str | None:
        """The precision of the weights in the forward and backward passes, except for batch norm,
        or None for float32. `train.precision` must have the same value.
        """
        return None

    @property
    def label(self) -> str:
        """The name shown in tables: the kind and its important options."""
        return self.kind

    @abstractmethod
    def start(self, backbone: nn.Module, world: World) -> "Strategy":
        """Distribute `backbone` over the ranks (collective). The backbone must already be on its
        device, and the world must have at least two ranks.
        """

    @property
    def sharding(self) -> Sharding:
        """What each rank stores of the backbone; by default, everything."""
        return Sharding()

    @abstractmethod
    def smaller(self) -> "StrategyKind | None":
        """Return the next strategy that requires less memory per rank, or None."""

    def change_to(self, other: "StrategyKind") -> str:
        """Return the recipe override that changes this strategy to `other`."""
        if other.kind != self.kind:
            return f"train.strategy.kind={other.kind}"
        mine, theirs = self.model_dump(mode="json"), other.model_dump(mode="json")
        changed = {key: value for key, value in theirs.items() if value != mine[key]}
        return " ".join(
            f"train.strategy.{key}={str(value).lower()}" for key, value in changed.items()
        )


class Strategy:
    """The strategy of a single process: the backbone is not distributed.

    `backbone` is a `Backbone`, which maps the inputs of a batch to features.

    Call `attach` once with the optimizer of `parameters`, the trainable parameters. All ranks must
    call `forward` and `backward` the same number of times, with zero rows if necessary. `last`
    marks the forward pass whose backward pass sums the gradients over ranks.

    `trained` contains the tensors that the optimizer updates, by the name of their weight.
    """

    def __init__(self, backbone: nn.Module) -> None:
        self.backbone = backbone
        self.trained = {name: p for name, p in backbone.named_parameters() if p.requires_grad}

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.trained.values())

    def attach(self, optimizer: Optimizer) -> None:
        """Set the optimizer that `step` uses."""
        self.optimizer = optimizer

    def forward(self, inputs: dict[str, Tensor], *, last: bool = True) -> Tensor:
        """Return features [b, dim] of this rank's rows (collective)."""
        del last
        features: Tensor = self.backbone(inputs)
        return features

    def backward(self, features: Tensor, gradient: Tensor) -> None:
        """Accumulate the gradients of the weights, given the gradient of `features`
        (collective)."""
        features.backward(gradient)

    def gradients(self) -> list[Tensor]:
        """Return this rank's pieces of all gradients. The caller may change them in place."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def squared_gradient_norm(self) -> Tensor:
        """Return the squared norm of the whole backbone's gradients, a float64 scalar that is the
        same on every rank (collective)."""
        return squared_norm(self.gradients(), self.parameters[0].device)

    def step(self) -> None:
        """Update the weights (collective)."""
        self.optimizer.step()

    def zero_gradients(self) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    # ---- checkpoints ----

    def create_moments(self) -> None:
        """Create the optimizer's moments, so that a checkpoint can be loaded into them."""
        create_moments_of(self.optimizer)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by name in canonical form: as full tensors or `Shard(0)` DTensors
        (collective)."""
        return {name: self.canonical(name, piece) for name, piece in self.live().items()}

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's tensors, including scalars, by weight and by name, in canonical
        form (collective).
        """
        return {
            name: {
                key: self.canonical(name, moment) if moment.ndim else moment
                for key, moment in tensors_of(self.optimizer, parameter).items()
            }
            for name, parameter in self.trained.items()
        }

    def restore(
        self, weights: Mapping[str, Tensor], moments: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Copy loaded values to the strategy (collective).

        `weights` and `moments` are the results of the methods with these names, after a checkpoint
        was loaded into them. In this base class they are the strategy's own tensors, so nothing is
        copied.
        """

    # ---- averaging ----

    def live(self) -> dict[str, Tensor]:
        """Return this rank's pieces of the weights that `step` updates. The caller may change
        them."""
        return {name: p.detach() for name, p in self.backbone.named_parameters()}

    def canonical(self, name: str, piece: Tensor) -> Tensor:
        """Return the canonical form of a tensor that is laid out like `live()[name]` (collective).
        The result shares memory if possible.
        """
        del name
        return piece

    def piece(self, name: str, canonical: Tensor) -> Tensor:
        """Return this rank's piece of a canonical tensor, the inverse of `canonical`
        (collective).
        """
        del name
        return canonical

    def close(self) -> None:
        """Release all objects that hold a process group."""
