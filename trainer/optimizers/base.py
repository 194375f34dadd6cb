"""The base class of optimizers: options with their bounds, the torch optimizer that they build, and
the cost of a step.

To add one, write a subclass in its own file and add its name to `__init__.py`.
"""

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from trainer.frozen import Frozen

Beta = Annotated[float, Field(ge=0, lt=1)]


class HeadOptions(Frozen):
    """Options of the head that differ from the backbone's; None: the same."""

    lr: float | None = Field(None, gt=0, description="peak rate; the schedule is the same")
    weight_decay: float | None = Field(None, ge=0)


class OptimizerKind(Frozen, ABC):
    """Options of an optimizer. A subclass adds `kind: Literal[...]`, its own options and bounds."""

    # The step of a tensor is scaled by norms of the whole tensor: no strategy may split it.
    needs_whole_tensors: ClassVar[bool] = False
    # The factored head takes its own steps, which are those of plain SGD.
    trains_factored_head: ClassVar[bool] = False

    kind: str
    lr: float = Field(gt=0)
    head: HeadOptions = HeadOptions()
    weight_decay: float = Field(0.01, ge=0)

    @property
    @abstractmethod
    def num_moments(self) -> int:
        """The number of tensors of a weight's size that the optimizer keeps for it."""

    @property
    def passes(self) -> int:
        """How many tensors of a weight's size a step reads or writes: it reads weight, gradient and
        moments, and writes weight and moments."""
        return 3 + 2 * self.num_moments

    @abstractmethod
    def temporaries(self, *, together: int, largest: int, cuda: bool) -> int:
        """Bytes that a step allocates for weights of `together` bytes, the largest tensor having
        `largest`: torch updates tensors one by one on CPUs and all of them together on CUDA."""

    @abstractmethod
    def build(
        self, groups: list[dict[str, Any]], norm_group: ProcessGroup | None = None
    ) -> Optimizer:
        """The torch optimizer of parameter `groups`. The rows of each parameter are sharded over
        `norm_group`, which optimizers need that take norms of a whole tensor."""

    @property
    def head_lr(self) -> float:
        """The head's peak rate."""
        return self.lr if self.head.lr is None else self.head.lr

    @property
    def head_weight_decay(self) -> float:
        return self.weight_decay if self.head.weight_decay is None else self.head.weight_decay

    def options(self) -> dict[str, Any]:
        """The arguments of the torch optimizer: all options except those of the head."""
        return self.model_dump(exclude={"kind", "head"})
