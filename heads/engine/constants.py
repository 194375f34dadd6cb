"""The constants of a head: what does not change from step to step."""

import zlib
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.engine.block_size import Processor
from heads.engine.inputs import options_of
from heads.logit_maps import LogitMap
from heads.losses import Loss
from heads.weights import ClassWeights


@dataclass(frozen=True)
class Engine:
    """The constants of one head: the plan of its weights, its loss and its process groups.

    The ranks of `class_group` have different classes and compute the same rows; the ranks of
    `data_group` have the same classes and different rows. None means a single process.
    `processor` selects the code and the block sizes for a CPU or a GPU. `memory_bytes` limits the
    memory used for logits (None: the default of the processor). In training, `log_prior` [K] is
    added to them. A row has the entry of its label in `class_weights` [K] as its weight in the mean
    (None: 1). If `tiles` is set, the kernels in `heads/tiles` compute the logits.
    """

    weights: ClassWeights
    loss: Loss
    class_group: ProcessGroup | None
    data_group: ProcessGroup | None
    logit_map: LogitMap
    processor: Processor
    memory_bytes: int | None = None
    log_prior: Tensor | None = None
    class_weights: Tensor | None = None
    tiles: bool = False

    @cached_property
    def settings(self) -> dict[str, str]:
        """What must be equal on every rank, as texts by what they describe."""
        weights, digest = self.class_weights, "none"
        if weights is not None:  # NumPy has no bf16
            digest = f"{zlib.crc32(weights.float().cpu().contiguous().numpy().tobytes()):08x}"
        return {
            "label trees": f"{self.weights.tree_digest:08x}",
            "losses": options_of(self.loss),
            "logit maps": options_of(self.logit_map),
            "class weights": digest,
        }

    @property
    def logit_bytes(self) -> int:
        """The memory limit for logits in bytes."""
        if self.memory_bytes is None:
            return self.processor.default_memory_mib << 20
        return self.memory_bytes

    @property
    def num_classes(self) -> int:
        return self.weights.tree.num_classes

    @property
    def groups(self) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        return self.class_group, self.data_group

    def to(self, device: torch.device) -> "Engine":
        """Return the same engine with its plan and constants on another device."""
        prior, class_weights = self.log_prior, self.class_weights
        return replace(
            self,
            weights=self.weights.rebuilt(self.weights.tree, device),
            processor=Processor.of(device),
            loss=self.loss.to(device),
            class_weights=None if class_weights is None else class_weights.to(device),
            log_prior=None if prior is None else prior.to(device),
        )
