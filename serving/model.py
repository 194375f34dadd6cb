"""A bundle ready to answer: pictures or texts -> features -> verdicts.

It knows nothing of HTTP or of Ray, so `kway query` uses it in its own process.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.images.decode import MAX_PIXELS
from serving.answer import Answer, Question, answer
from serving.readers import open_reader
from trainer.bundle import Bundle


class Model:
    """An opened bundle with its backbone, on the CPU, in float32."""

    def __init__(self, bundle: Bundle, *, max_pixels: int = MAX_PIXELS) -> None:
        self.bundle = bundle
        self.reads = bundle.spec.reads
        # What one input is in the backbone's batch.
        self.crops: int = bundle.spec.image.crops if bundle.spec.image is not None else 1
        self._reader = open_reader(bundle, max_pixels=max_pixels)
        self._backbone = bundle.load_backbone()

    @classmethod
    def open(cls, path: Path, *, max_pixels: int = MAX_PIXELS) -> "Model":
        """Open the bundle folder `path`; errors are those of `Bundle.open` and its `load_…`."""
        return cls(Bundle.open(path), max_pixels=max_pixels)

    def prepare(self, raw: bytes | str) -> Any:
        """A picture file's bytes, or a text, as this model reads it -> what `features` takes.

        Raises ValueError for what is wrong with it.
        """
        return self._reader.prepare(raw)

    @torch.inference_mode()
    def features(self, prepared: Sequence[Any]) -> Tensor:
        """Prepared inputs, whatever their sizes -> features [B, dim], in one forward pass."""
        return self._backbone(self._reader.collate(prepared)).float()

    def answer(self, prepared: Sequence[Any], question: Question) -> Answer:
        """Verdicts for prepared inputs, in one forward pass."""
        return answer(self.bundle, self.features(prepared), question)

    def self_check(self) -> None:
        """Ask about any pictures or texts, the longest included; ValueError when the model cannot
        read them or gives no finite logit."""
        try:
            found = self.answer(self._reader.examples(), Question((0,)))
        except (RuntimeError, IndexError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"{self.bundle.path} fails at any of the {self.reads} ({reason}): its files do not "
                "fit together, export it again"
            ) from error
        for score in (result.verdicts[0].score for result in found.results):
            if not math.isfinite(score):
                raise ValueError(
                    f"{self.bundle.path} answers {score} for any of the {self.reads}: its "
                    "weights are damaged or the run diverged, export it again"
                )
