"""The side of training pictures at each step: progressive resizing.

It depends on the samples consumed before the step alone, as the order does, so that every rank,
worker and resumed run sees the same pixels.
"""

from itertools import pairwise

from data.augment.training import AugmentConfig
from data.images.config import ImageConfig


class Sides:
    """What `augment.progressive` and `augment.size` say, for epochs of `num_samples`.

    Raises ValueError where a stage does not end after the one before it.
    """

    def __init__(
        self, image: ImageConfig, augment: AugmentConfig, *, num_samples: int, global_batch: int
    ) -> None:
        self._last = augment.size or image.size
        # The samples consumed when each stage ends, and its side.
        self._stages: list[tuple[int, int]] = []
        for stage in augment.progressive:
            steps = stage.until.in_steps(num_samples=num_samples, global_batch=global_batch)
            self._stages.append((steps * global_batch, stage.size))
        for (before, _), (end, side) in pairwise(self._stages):
            if end <= before:
                raise ValueError(
                    f"data.augment.progressive: the stage of {side} pixels ends at step "
                    f"{end // global_batch} and the one before it at {before // global_batch}: "
                    "give stages in order, each of a step or more"
                )

    def at(self, samples: int) -> int:
        """Pixels, for the batch that begins after `samples`."""
        return next((side for end, side in self._stages if samples < end), self._last)
