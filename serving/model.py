"""A bundle ready to answer: bytes of pictures -> pixels -> features.

It knows nothing of HTTP or of Ray, so `kway query` uses it in its own process.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from data.config import ImageConfig
from data.images import MAX_PIXELS, decode, for_evaluation
from serving.answer import Answer, Question, answer
from trainer.bundle import Bundle


def picture_settings(bundle: Bundle) -> ImageConfig:
    """The preprocessing of a model of pictures; ValueError for a model of texts."""
    if bundle.spec.image is None:
        raise ValueError(
            f"{bundle.path} reads texts, and this kway answers about pictures only: update kway"
        )
    return bundle.spec.image


class Model:
    """An opened bundle with its backbone, on the CPU, in float32."""

    def __init__(self, bundle: Bundle) -> None:
        """Raises ValueError for a model of texts, which this version does not serve."""
        self.bundle = bundle
        self.image = picture_settings(bundle)
        self._backbone = bundle.load_backbone()

    @classmethod
    def open(cls, path: Path) -> "Model":
        """Open the bundle folder `path`; errors are those of `Bundle.open` and `load_backbone`."""
        return cls(Bundle.open(path))

    def prepare(self, data: bytes, *, max_pixels: int = MAX_PIXELS) -> Tensor:
        """Bytes of a picture file -> uint8 [C, size, size], by the very code of evaluation.

        Raises ValueError for what is no picture, is damaged, has too many pixels or is too thin
        a strip.
        """
        picture = decode(data, channels=self.image.channels, max_pixels=max_pixels)
        return torch.as_tensor(for_evaluation(picture, self.image))

    @torch.inference_mode()
    def features(self, pictures: Sequence[Tensor]) -> Tensor:
        """Pictures uint8 [C, size, size] -> features [B, dim], in one forward pass."""
        return self._backbone({"pixel_values": torch.stack(list(pictures))}).float()

    def answer(self, pictures: Sequence[Tensor], question: Question) -> Answer:
        """Verdicts for `pictures`, in one forward pass."""
        return answer(self.bundle, self.features(pictures), question)

    def self_check(self) -> None:
        """Ask about a grey picture; ValueError when the model does not give finite logits."""
        grey = torch.full(
            (self.image.channels, self.image.size, self.image.size), 128, dtype=torch.uint8
        )
        verdicts = self.answer([grey], Question((0,))).results[0].verdicts
        if not torch.isfinite(torch.tensor(verdicts[0].logit)):
            raise ValueError(
                f"{self.bundle.path} answers {verdicts[0].logit} for a grey picture: its weights "
                "are damaged or the run diverged, export it again"
            )
