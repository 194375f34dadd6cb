"""What a model reads: how one picture or text is prepared, and how several become a batch.

All by the very code of evaluation.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from data.images.config import ImageConfig
from data.images.decode import MAX_PIXELS, crops_for_evaluation, decode
from data.loading.inputs import pad_tokens
from data.text.tokenizer import Tokenizer
from trainer.bundle.bundle import Bundle

_ANY_TEXT = "Is this a text? "


class Reader(Protocol):
    """Of pictures or of texts."""

    def prepare(self, raw: Any) -> Any:
        """One input as a client sent it -> what waits for its batch; ValueError says what is wrong
        with it."""
        ...

    def collate(self, prepared: Sequence[Any]) -> dict[str, Tensor]:
        """Prepared inputs, whatever their lengths -> the backbone's inputs."""
        ...

    def examples(self) -> list[Any]:
        """Prepared inputs that every model must have an answer to."""
        ...


def open_reader(bundle: Bundle, *, max_pixels: int = MAX_PIXELS) -> Reader:
    """The one of `bundle`'s model; errors are those of `Bundle.load_tokenizer`."""
    if bundle.spec.image is not None:
        return Pictures(bundle.spec.image, max_pixels)
    return Texts(bundle.load_tokenizer())


class Pictures:
    """Picture files -> pixels uint8 [C, size, size], or [crops, C, size, size]."""

    def __init__(self, image: ImageConfig, max_pixels: int) -> None:
        self._image = image
        self._max_pixels = max_pixels

    def prepare(self, raw: bytes) -> Tensor:
        """Raises ValueError for what is no picture, is damaged, has too many pixels or is too thin
        a strip."""
        return self._crops(decode(raw, self._image.channels, self._max_pixels))

    def collate(self, prepared: Sequence[Tensor]) -> dict[str, Tensor]:
        return {"pixel_values": torch.stack(list(prepared))}

    def examples(self) -> list[Tensor]:
        side = self._image.resize or self._image.size
        return [self._crops(np.full((side, side, self._image.channels), 128, np.uint8))]

    def _crops(self, picture: np.ndarray) -> Tensor:
        return torch.as_tensor(crops_for_evaluation(picture, self._image))


class Texts:
    """Texts -> token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prepare(self, raw: str) -> list[int]:
        """Raises ValueError for a text that is no Unicode."""
        return self._tokenizer.encode([raw])[0]

    def collate(self, prepared: Sequence[list[int]]) -> dict[str, Tensor]:
        return pad_tokens(prepared, self._tokenizer.pad_id, max_length=self._tokenizer.max_length)

    def examples(self) -> list[list[int]]:
        """A short text, and one that is cut at `max_length` tokens."""
        return self._tokenizer.encode([_ANY_TEXT, _ANY_TEXT * self._tokenizer.max_length])
