"""What a sample's bytes become on the way to the model: pictures to pixels, texts to tokens.

It knows nothing of order, shards or ranks. A loader decodes a sample, makes an item of it and
collates the items of a batch.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from data.augment import SampleDraws, for_training
from data.augment.training import AugmentConfig
from data.config import DataConfig, TextConfig
from data.images.config import ImageConfig
from data.images.decode import crops_for_evaluation, decode
from data.loading.padding import pad_tokens
from data.loading.pixel_memory import PixelMemory
from data.shards.manifest import Manifest
from data.shards.utf8 import decode_text
from data.tokens.tokenizer import open_tokenizer


class Inputs(Protocol):
    """How the samples of one modality are read."""

    by_length: bool
    """Whether samples of about one length are to share a batch."""

    def decode(self, data: bytes) -> Any:
        """A sample's bytes -> what it shows. Raises ValueError where they are damaged."""
        ...

    def for_training(self, decoded: Any, *, side: int, seed: int, epoch: int, index: int) -> Any:
        """The item of a sample, changed at random as (seed, epoch, index) say; `side` pixels of a
        picture."""
        ...

    def for_evaluation(self, decoded: Any) -> Any:
        """The item of a sample as it is."""
        ...

    def collate(self, items: Iterable[Any], num: int, *, side: int) -> dict[str, Tensor]:
        """The `num` items of a batch -> the model's inputs [num, ...]; it may be 0."""
        ...


def open_inputs(config: DataConfig, manifest: Manifest) -> Inputs:
    """Those of the shards' modality.

    Raises ValueError where the recipe has no tokenizer for texts, or one for pictures.
    """
    if manifest.modality == "image":
        if config.text is not None:
            raise ValueError(
                f"{config.shards} holds pictures and data.text is given: leave it out, or choose "
                "shards of texts"
            )
        return Pictures(config.image, config.augment)
    if config.text is None:
        raise ValueError(
            f"{config.shards} holds texts and data.text is missing: name a tokenizer in "
            "data.text.tokenizer (kway tokenizer makes one)"
        )
    if config.augment != AugmentConfig():
        raise ValueError(
            f"{config.shards} holds texts and data.augment is for pictures: leave it out"
        )
    return Texts(config.text)


class Pictures:
    """Pixels uint8; normalising happens on the device."""

    by_length = False

    def __init__(self, image: ImageConfig, augment: AugmentConfig) -> None:
        self._image = image
        self._augment = augment
        self._draws = SampleDraws()
        self._memory = PixelMemory()

    def decode(self, data: bytes) -> np.ndarray:
        return decode(data, self._image.channels)

    def for_training(
        self, decoded: np.ndarray, *, side: int, seed: int, epoch: int, index: int
    ) -> np.ndarray:
        rng = self._draws.at(seed, epoch, index)
        return for_training(decoded, self._image.scaled_to(side), self._augment, rng)

    def for_evaluation(self, decoded: np.ndarray) -> np.ndarray:
        return crops_for_evaluation(decoded, self._image)

    def collate(self, items: Iterable[np.ndarray], num: int, *, side: int) -> dict[str, Tensor]:
        items = iter(items)
        first = next(items, None)
        shape = (self._image.channels, side, side) if first is None else first.shape
        pixels = self._memory.empty((num, *shape))
        # One after the other, so that the memory of one is that of the next.
        rows = pixels.numpy()
        for row, item in enumerate(chain(() if first is None else (first,), items)):
            rows[row] = item
        return {"pixel_values": pixels}


class Texts:
    """Token ids, filled up to a common length; the mask tells tokens from filling."""

    by_length = True

    def __init__(self, config: TextConfig) -> None:
        self.tokenizer = open_tokenizer(config.tokenizer, max_length=config.max_length)

    def decode(self, data: bytes) -> str:
        return decode_text(data)

    def for_training(self, decoded: str, *, side: int, seed: int, epoch: int, index: int) -> str:
        return decoded

    def for_evaluation(self, decoded: str) -> str:
        return decoded

    def collate(self, items: Iterable[str], num: int, *, side: int) -> dict[str, Tensor]:
        tokenizer = self.tokenizer
        tokens = tokenizer.encode(list(items))
        return pad_tokens(tokens, tokenizer.pad_id, max_length=tokenizer.max_length)
