"""Converts a sample's bytes into model inputs: images to pixels, texts to token IDs.

This module does not depend on the order, shards or ranks. A loader decodes each sample, converts it
to an item and collates the items of a batch.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from data.augment.base import Draws
from data.augment.training import AugmentConfig, TrainingImages
from data.config import DataConfig, TextConfig
from data.images.config import ImageConfig
from data.images.decode import copy_planes, decode, for_evaluation
from data.loading.workers import NUM_SLOTS
from data.shards.manifest import Manifest
from data.shards.split import decode_text
from data.text.tokenizer import open_tokenizer

# Use few distinct widths, so that compiled models recompile less often. Matrix units are most
# efficient for multiples of 8.
_WIDTH_MULTIPLE = 8


class Items(NamedTuple):
    """Converts the samples of a batch to items, in two steps.

    decode: decodes the sample in a row from its bytes or, in training, the part of it that is
    needed, such as a random crop. Raises ValueError if they are damaged. finish: converts the
    sample that `decode` decoded last to an item, with the remaining random augmentation in training
    and without random changes in evaluation.
    """

    decode: Callable[[int, bytes], Any]
    finish: Callable[[Any], Any]


def open_inputs(config: DataConfig, manifest: Manifest) -> "ImageInputs | TextInputs":
    """Return the inputs for the modality of the shards.

    Raises ValueError if the recipe does not set a tokenizer for texts, or sets one for images.
    """
    if manifest.modality == "image":
        if config.text is not None:
            raise ValueError(
                f"{config.shards} contains images, but data.text is set: remove data.text, or "
                "choose text shards"
            )
        return ImageInputs(config.image, config.augment)
    if config.text is None:
        raise ValueError(
            f"{config.shards} contains texts, but data.text is missing: set data.text.tokenizer "
            "(kway tokenizer trains one)"
        )
    if config.augment != AugmentConfig():
        raise ValueError(
            f"{config.shards} contains texts, but data.augment applies to images: remove "
            "data.augment"
        )
    return TextInputs(config.text)


class ImageInputs:
    """Produces uint8 pixels. Normalization happens on the device."""

    by_length = False
    """Whether samples of similar length should share a batch."""

    def __init__(self, image: ImageConfig, augment: AugmentConfig) -> None:
        self._image = image
        self._augment = augment
        self._training = TrainingImages(image, augment)
        self._draws = Draws()
        self._memory = PixelMemory()

    def training_batch(
        self, seed: int, epochs: np.ndarray, indices: np.ndarray, *, side: int
    ) -> Items:
        """Return the conversion of the samples `indices` in `epochs` (int64 [n] each).

        The random numbers are keyed by (seed, epoch, index). side: of the images, in pixels.
        """
        if side != self._training.config.size:
            self._training = TrainingImages(self._image.scaled_to(side), self._augment)
        images, draws = self._training, self._draws
        keys = list(zip(epochs.tolist(), indices.tolist(), strict=True))
        return Items(
            lambda row, data: images.decoded(data, draws.at(seed, *keys[row])),
            lambda decoded: images.augmented(decoded, draws.rng),
        )

    def evaluation_batch(self) -> Items:
        image = self._image
        return Items(
            lambda _, data: decode(data, image.channels),
            lambda decoded: for_evaluation(decoded, image),
        )

    def collate(self, items: Iterable[np.ndarray], num: int, *, side: int) -> dict[str, Tensor]:
        """Collate the `num` items of a batch into the model's inputs [num, ...].

        `num` may be 0.
        """
        items = iter(items)
        first = next(items, None)
        shape = (self._image.channels, side, side) if first is None else first.shape
        pixels = self._memory.empty((num, *shape))
        # Items are copied one at a time, so that each item can reuse the memory of the previous
        # one.
        for item, row in zip(
            chain([] if first is None else [first], items), pixels.numpy(), strict=True
        ):
            copy_planes(item, row)
        return {"pixel_values": pixels}


class PixelMemory:
    """The memory for the batches of one process.

    Pickling creates an empty instance, so that each process has its own.
    """

    def __init__(self) -> None:
        self._slots = [torch.empty(0, dtype=torch.uint8)] * NUM_SLOTS
        self._next_slot = 0

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Return an uninitialized uint8 tensor of `shape`.

        In a worker, the memory is shared with the trainer and reused `NUM_SLOTS` batches later. The
        trainer must copy it before then.
        """
        if get_worker_info() is None:
            return torch.empty(shape, dtype=torch.uint8)
        size = math.prod(shape)
        self._next_slot = (self._next_slot + 1) % NUM_SLOTS
        if len(self._slots[self._next_slot]) < size:
            self._slots[self._next_slot] = torch.empty(size, dtype=torch.uint8).share_memory_()
        return self._slots[self._next_slot][:size].view(shape)

    def __reduce__(self) -> tuple[type["PixelMemory"], tuple[()]]:
        return PixelMemory, ()


class TextInputs:
    """Produces token IDs padded to a common length, with an attention mask."""

    by_length = True

    def __init__(self, config: TextConfig) -> None:
        self.tokenizer = open_tokenizer(config.tokenizer, max_length=config.max_length)

    def training_batch(
        self, seed: int, epochs: np.ndarray, indices: np.ndarray, *, side: int
    ) -> Items:
        return self.evaluation_batch()

    def evaluation_batch(self) -> Items:
        return Items(lambda _, data: decode_text(data), lambda text: text)

    def collate(self, items: Iterable[str], num: int, *, side: int) -> dict[str, Tensor]:
        tokenizer = self.tokenizer
        tokens = tokenizer.encode(list(items))
        return pad_tokens(tokens, tokenizer.pad_id, max_length=tokenizer.max_length)


def pad_tokens(
    tokens: Sequence[Sequence[int]], pad_id: int, *, max_length: int
) -> dict[str, Tensor]:
    """Pad the token IDs of b texts and return `input_ids` and `attention_mask`, int64 [b, T].

    Texts must not be longer than `max_length`. T is the length of the longest text, rounded up to a
    multiple of 8, but at most `max_length`, the number of positions in the model. The mask is 0 at
    padding.
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
