"""What a sample's bytes become on the way to the model: pictures to pixels, texts to tokens.

It knows nothing of order, shards or ranks. A loader decodes a sample, makes an item of it and
collates the items of a batch.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from data.augment.base import SampleGenerator
from data.augment.training import AugmentConfig, for_training
from data.config import DataConfig, TextConfig
from data.images.config import ImageConfig
from data.images.decode import crops_for_evaluation, decode
from data.loading.workers import PixelMemory
from data.shards.manifest import Manifest
from data.shards.split import decode_text
from data.text.tokenizer import open_tokenizer

# Few widths, which compiled models and matrix units like.
_WIDTH_MULTIPLE = 8


class Inputs(Protocol):
    """How the samples of one modality are read."""

    by_length: bool
    """Whether samples of about one length are to share a batch."""

    def decode(self, data: bytes) -> Any:
        """A sample's bytes -> what it shows. Raises ValueError where they are damaged."""

    def for_training(self, decoded: Any, *, side: int, seed: int, epoch: int, index: int) -> Any:
        """The item of a sample, changed at random as (seed, epoch, index) say; `side` pixels of a
        picture."""

    def for_evaluation(self, decoded: Any) -> Any:
        """The item of a sample as it is."""

    def collate(self, items: Iterable[Any], num: int, *, side: int) -> dict[str, Tensor]:
        """The `num` items of a batch -> the model's inputs [num, ...]; it may be 0."""


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
        return ImageInputs(config.image, config.augment)
    if config.text is None:
        raise ValueError(
            f"{config.shards} holds texts and data.text is missing: name a tokenizer in "
            "data.text.tokenizer (kway tokenizer makes one)"
        )
    if config.augment != AugmentConfig():
        raise ValueError(
            f"{config.shards} holds texts and data.augment is for pictures: leave it out"
        )
    return TextInputs(config.text)


class ImageInputs:
    """Pixels uint8; normalising happens on the device."""

    by_length = False

    def __init__(self, image: ImageConfig, augment: AugmentConfig) -> None:
        self._image = image
        self._augment = augment
        self._draws = SampleGenerator()
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


class TextInputs:
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


def pad_tokens(
    tokens: Sequence[Sequence[int]], pad_id: int, *, max_length: int
) -> dict[str, Tensor]:
    """Token ids of b texts, none longer than `max_length`, -> `input_ids` and `attention_mask`,
    int64 [b, T].

    T is the longest length, rounded up to a multiple of 8, but not beyond `max_length`: a model has
    no more positions. The mask is 0 where `pad_id` fills.
    """
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    longest = int(lengths.max(initial=1))
    assert longest <= max_length
    width = min(-(-longest // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE, max_length)
    mask = np.arange(width) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, np.int64)
    ids[mask] = np.fromiter(chain.from_iterable(tokens), np.int64, int(lengths.sum()))
    return {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
    }
