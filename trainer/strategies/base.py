"""What every strategy does for the backbone; as it stands, for one process alone.

Gradients are summed over ranks: the head's are those of the global mean already. A strategy's
tensors are this rank's: the whole of a weight, or its piece of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from data.base_config import FrozenConfig
from heads.gradients import squared_norm
from trainer.optimizers import create_moments_of, tensors_of
from trainer.strategies.cost import Shapes, Spread

if TYPE_CHECKING:  # these import the recipe, which imports the strategies
    from trainer.backbone.backbone import Backbone
    from trainer.world import World


class StrategyKind(FrozenConfig, ABC):
    """Options of a strategy. A subclass adds `kind: Literal[...]` and its own options.

    To add one, write the subclass and its `Strategy` in a file and add its name to `__init__.py`.
    """

    # Weights keep their memory format (channels_last).
    keeps_memory_format: ClassVar[bool] = False
    # `Strategy.weights` are DTensors, sharded by rows.
    weights_are_dtensors: ClassVar[bool] = False

    kind: str

    @property
    def shards_updates(self) -> bool:
        """Whether each rank updates only a share of the weights."""
        return self.weights_are_dtensors

    @property
    def flattens_tensors(self) -> bool:
        """Whether the optimizer gets flat pieces instead of whole tensors."""
        return False

    @property
    def label(self) -> str:
        """The name in tables: the kind, with its most important option."""
        return self.kind

    @abstractmethod
    def start(self, backbone: "Backbone", world: "World") -> "Strategy":
        """Distribute `backbone`, which is already on its device, over the ranks of a world of two
        or more (collective)."""

    @abstractmethod
    def spread(self, units: Sequence[Shapes], ranks: int, *, passes: int, parts: int) -> Spread:
        """The cost for each of `ranks` of a step with `passes` forward passes, of which `parts` are
        followed by a backward pass. `units` are the shapes of the backbone's weights, block by
        block, those outside the blocks last."""

    @abstractmethod
    def smaller(self, *, whole_tensors: bool) -> "StrategyKind | None":
        """The next strategy that needs less memory on a rank, if there is one. `whole_tensors`: the
        optimizer does not accept pieces of a tensor."""

    def change_to(self, other: "StrategyKind") -> str:
        """The override of a recipe that turns this strategy into `other`."""
        if other.kind != self.kind:
            return f"train.strategy.kind={other.kind}"
        mine, theirs = self.model_dump(mode="json"), other.model_dump(mode="json")
        changed = {key: value for key, value in theirs.items() if value != mine[key]}
        return " ".join(
            f"train.strategy.{key}={str(value).lower()}" for key, value in changed.items()
        )


class Strategy:
    """One process: the backbone as it is.

    `attach` hands over the optimizer of `parameters`, what is trained, once. `forward` and
    `backward` are called by all ranks the same number of times, with or without rows, and `last`
    marks the pass whose backward sums the gradients over ranks.
    """

    def __init__(self, backbone: "Backbone") -> None:
        self.backbone = backbone
        self.parameters = trainable_parameters(backbone)

    def attach(self, optimizer: Optimizer) -> None:
        """Take the optimizer that `step` is to use."""
        self.optimizer = optimizer

    def forward(self, inputs: dict[str, Tensor], *, last: bool = True) -> Tensor:
        """Features [b, dim] of this rank's rows (collective)."""
        del last
        features: Tensor = self.backbone(inputs)
        return features

    def backward(self, features: Tensor, gradient: Tensor) -> None:
        """Add the weights' gradients for those of `features` (collective)."""
        features.backward(gradient)

    def gradients(self) -> list[Tensor]:
        """This rank's pieces of all gradients, to be read and changed in place."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def squared_gradient_norm(self) -> Tensor:
        """That of the whole backbone, a float64 scalar, the same on every rank (collective)."""
        return squared_norm(self.gradients(), self.parameters[0].device)

    def step(self) -> None:
        """Update the weights (collective)."""
        self.optimizer.step()

    def zero_gradients(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    # ---- checkpoints ----

    def create_moments(self) -> None:
        """Make the optimizer's moments exist, so that a checkpoint has somewhere to go."""
        create_moments_of(self.optimizer)

    def weights(self) -> dict[str, Tensor]:
        """The weights by name in their canonical form: whole, or as `Shard(0)` DTensors."""
        return {name: p.detach() for name, p in self.backbone.named_parameters()}

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's tensors by weight and name, in the same form; scalars too."""
        return {
            name: tensors_of(self.optimizer, parameter)
            for name, parameter in self.backbone.named_parameters()
        }

    def restore(
        self, weights: Mapping[str, Tensor], moments: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Take over what was loaded into the tensors of `weights` and `moments`; here they are the
        strategy's own, and nothing is left to do (collective)."""

    # ---- averaging ----

    def live(self) -> dict[str, Tensor]:
        """This rank's pieces of the weights as `step` leaves them, to be read and changed."""
        return self.weights()

    def canonical(self, name: str, piece: Tensor) -> Tensor:
        """A tensor laid out as `live()[name]` in canonical form, sharing memory if that is
        possible (collective)."""
        del name
        return piece

    def piece(self, name: str, canonical: Tensor) -> Tensor:
        """The reverse of `canonical` (collective)."""
        del name
        return canonical

    def close(self) -> None:
        """Let go of everything that holds a process group."""


def trainable_parameters(backbone: "Backbone") -> list[nn.Parameter]:
    """Walks all modules: not for every step."""
    return [p for p in backbone.parameters() if p.requires_grad]
