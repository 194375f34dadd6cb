"""A task: a backbone and a head with their strategy, optimizers and moving averages.

`trainer/step.py` trains it.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from data.classes.class_list import ClassList
from data.classes.strings import Strings
from data.loading.batch import Batch, Mixed
from data.loading.order import share as share_of_batch
from heads import ClassHead, LabelSets, build_head
from heads.build import ClassPaths
from trainer.backbone.backbone import Backbone, build_backbone
from trainer.backbone.batch_norm import apply_batch_norm_mode, persistent_buffers
from trainer.backbone.blocks import checkpoint_blocks, compile_blocks
from trainer.config import Recipe
from trainer.ema import MovingAverage
from trainer.initial_weights import load_initial_weights
from trainer.loss_scale import LossScale
from trainer.optimizers import build_head_optimizer, build_optimizer, create_momentum
from trainer.strategies import Strategy
from trainer.telemetry.phases import Phases
from trainer.world import World

_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Task(nn.Module):
    """A backbone that computes features and a head that computes the loss.

    A new task can only be evaluated. To train it, call `start_training`, which creates the strategy
    and the optimizers.
    """

    head_optimizer: Optimizer | None = None
    head_rate = 0.0
    average: MovingAverage | None = None
    # Whether the optimizers read the flag of a step that must be skipped (`trainer/step.py`), so
    # that the host can read it later.
    defers = False
    # Whether the labels and row weights of the first batch were checked. The head does not check
    # its inputs in every step, which would make the host wait.
    has_checked_inputs = False
    # The number of classes whose rows come from `head.init`.
    num_initial_rows: int | None = None

    def __init__(
        self,
        backbone: Backbone,
        head: ClassHead,
        recipe: Recipe,
        world: World,
        phases: Phases | None = None,
    ) -> None:
        super().__init__()
        self.world, self.recipe = world, recipe
        self.phases = phases or Phases(world.device)
        train = recipe.train
        self.global_batch = train.global_batch
        # Do not use more parts than there are samples in the largest share: a part that is empty
        # on every rank would have no loss.
        self.micro_batches = min(train.micro_batches, -(-self.global_batch // world.size))
        apply_batch_norm_mode(backbone, recipe.backbone.batch_norm, world.group)
        backbone.precision = self.precision = _PRECISIONS[train.precision]
        backbone.channels_last = train.channels_last
        self.backbone = backbone.to(world.device)
        self.head = head
        self.num_backbone_weights = sum(p.numel() for p in self.backbone.parameters())
        self.loss_scale = LossScale(train.precision, world.device)
        self.strategy = Strategy(self.backbone)

    def start_training(self) -> None:
        """Distribute the backbone over the ranks with the recipe's strategy and create the
        optimizers (collective)."""
        recipe, encoder = self.recipe, self.backbone.encoder
        train = recipe.train
        if train.channels_last and train.strategy.keeps_memory_format:
            # Skip this for sharded weights: they are gathered in contiguous layout and converted
            # where they are used.
            encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if train.compile:
            compile_blocks(encoder)
        if train.activation_checkpointing:
            checkpoint_blocks(encoder)
        if self.world.group is not None:  # there is nothing to distribute in one process
            self.strategy = train.strategy.start(self.backbone, self.world)
        strategy = self.strategy
        strategy.attach(build_optimizer(recipe.optimizer, strategy.parameters))
        clips = recipe.train.clip_norm is not None
        self.head_optimizer = build_head_optimizer(recipe.optimizer, self.head, clips=clips)
        self.defers = self._defers()
        if self.defers:
            for optimizer in (self.strategy.optimizer, self.head_optimizer):
                create_momentum(optimizer)
        if train.ema is not None:
            self.average = MovingAverage(train.ema, self.live())

    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return features [b, dim] in float32 on the device, for evaluation. Collective if the
        strategy shards weights: every rank must then call it the same number of times, with zero
        rows if necessary.
        """
        inputs = {name: tensor.to(self.world.device) for name, tensor in inputs.items()}
        with torch.no_grad():
            return self.strategy.forward(inputs).float()

    @cached_property
    def rank_rows(self) -> list[int]:
        """The number of rows of each rank in a global batch."""
        ranks = self.world.size
        return [len(share_of_batch(self.global_batch, rank, ranks)) for rank in range(ranks)]

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context in which matrix products use `train.precision`."""
        if self.precision is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, self.precision)

    def _defers(self) -> bool:
        synchronous, reason = self.recipe.train.synchronous, None
        optimizers = [self.strategy.optimizer, self.head_optimizer]
        if self.world.size > 1 and not self.recipe.train.strategy.can_defer:
            reason = f"train.strategy.kind is {self.recipe.train.strategy.kind}"
        elif self.head_optimizer is None:
            reason = f"head.weights.kind is {self.recipe.head.weights.kind}"
        elif not all(getattr(each, "_step_supports_amp_scaling", False) for each in optimizers):
            # torch's flag for optimizers whose `step` reads `grad_scale` and `found_inf`
            reason = f"optimizer.kind is {self.recipe.optimizer.kind}, which ignores found_inf"
        if synchronous is None:
            return self.world.device.type == "cuda" and reason is None
        if not synchronous and reason is not None:
            raise ValueError(f"train.synchronous is false, but {reason}: omit train.synchronous")
        return not synchronous

    def zero_gradients(self) -> None:
        """Clear all gradients (collective)."""
        self.strategy.zero_gradients()
        self.head.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Release the objects that hold process groups, so that the groups can be destroyed."""
        self.strategy.close()
        self.head_optimizer = self.average = None

    # ---- averaged weights ----

    def live(self) -> dict[str, Tensor]:
        """Return this rank's pieces of the averaged tensors: weights, and floating-point buffers
        such as those of batch norm."""
        pieces = self.strategy.live() | self._averaged_buffers
        live = {f"backbone.{name}": piece for name, piece in pieces.items()}
        return live | {f"head.{name}": p.detach() for name, p in self.head.named_parameters()}

    @cached_property
    def _averaged_buffers(self) -> dict[str, Tensor]:
        # Cached because every step reads them.
        buffers = persistent_buffers(self.backbone)
        return {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the weights with their moving averages inside the context, if the run has moving
        averages.
        """
        if self.average is None:
            yield
            return
        with self.average.swapped_in(self.live):
            yield


def labels_of(part: Batch | Mixed) -> Tensor | LabelSets:
    """Return the labels of the rows as a head takes them."""
    return part.labels if part.offsets is None else LabelSets(part.labels, part.offsets)


def build_task(
    recipe: Recipe,
    *,
    class_names: Sequence[str],
    label_vectors: np.ndarray | None,
    world: World,
    class_counts: np.ndarray | None = None,
    class_paths: ClassPaths | None = None,
    phases: Phases | None = None,
) -> Task:
    """Build a recipe's task. The initial weights do not depend on the rank or the world size.

    Raises the errors of `load_initial_weights`.
    """
    names = Strings.of(class_names)
    torch.manual_seed(recipe.seed)
    backbone = build_backbone(recipe.backbone, image=recipe.data.image)
    head = build_head(
        recipe.head,
        dim=backbone.dim,
        num_classes=len(names),
        tree_positions=lambda text, ends: ClassList.of_names(Strings(text, ends)).find_all(names),
        label_vectors=label_vectors,
        mesh=world.mesh,
        seed=recipe.seed,
        device=world.device,
        class_counts=class_counts,
        class_paths=class_paths,
    )
    num_rows = load_initial_weights(backbone, head, recipe, names)
    task = Task(backbone, head, recipe, world, phases)
    task.num_initial_rows = num_rows
    return task
