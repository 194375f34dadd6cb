"""Code that users without kway would write to turn tars of JPEGs into batches.

This module does not import kway. It contains a webdataset pipeline, and a map-style dataset that
reads the same tars with `tarfile` and `pread`. Each uses a decoder (Pillow, simplejpeg or OpenCV),
takes a random crop, resizes it to 224 x 224, flips half of the images and produces uint8 batches
[B, 3, 224, 224].
"""

import io
import math
import os
import random
import tarfile
from collections.abc import Callable, Iterator, Sequence

import cv2
import numpy as np
import simplejpeg
import webdataset
from PIL import Image
from torch.utils.data import Dataset

SIDE = 224
_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
_ATTEMPTS = 10

# Only local tars are read, so disable webdataset's URLs that run shell commands.
webdataset.utils.enforce_security = True

# Bytes of a JPEG -> uint8 [3, 224, 224].
Sampled = Callable[[bytes], np.ndarray]


def with_pillow(data: bytes) -> np.ndarray:
    """Decode and resize with Pillow, as most training scripts do."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    top, left, height, width = _box(image.height, image.width)
    box = (left, top, left + width, top + height)
    image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image).transpose(2, 0, 1)


def with_simplejpeg(data: bytes) -> np.ndarray:
    """Decode with libjpeg-turbo at its fastest settings, then resize with OpenCV."""
    decoded = simplejpeg.decode_jpeg(data, "RGB", fastdct=True, fastupsample=True)
    return _cropped(decoded)


def with_opencv(data: bytes) -> np.ndarray:
    """Decode and resize with OpenCV."""
    return _cropped(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB))


def _cropped(image: np.ndarray) -> np.ndarray:
    top, left, height, width = _box(*image.shape[:2])
    crop = image[top : top + height, left : left + width]
    crop = cv2.resize(crop, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)
    if random.random() < 0.5:
        crop = cv2.flip(crop, 1)
    return crop.transpose(2, 0, 1)


def _box(height: int, width: int) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a random box, as in torchvision's RandomResizedCrop."""
    for _ in range(_ATTEMPTS):
        area = height * width * random.uniform(*_AREA)
        ratio = math.exp(random.uniform(math.log(_RATIO[0]), math.log(_RATIO[1])))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = random.randint(0, height - box_height)
            left = random.randint(0, width - box_width)
            return top, left, box_height, box_width
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def webdataset_batches(
    tars: Sequence[str], sampled: Sampled, batch: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return infinite batches of images and labels, in the order of the tars."""
    dataset = (
        webdataset.WebDataset(list(tars), shardshuffle=False)
        .to_tuple("jpg", "cls")
        .map_tuple(sampled, int)
        .batched(batch, partial=False)
        .repeat()
    )
    return iter(dataset)


class TarImages(Dataset[tuple[np.ndarray, int]]):
    """Random access to the samples of `tars`, via a list of offsets and one `pread` per sample."""

    def __init__(self, tars: Sequence[str], sampled: Sampled) -> None:
        self._sampled = sampled
        self._samples: list[tuple[int, int, int, int]] = []  # descriptor, offset, size, label
        for path in tars:
            descriptor = os.open(path, os.O_RDONLY)
            with tarfile.open(path) as tar:
                members = {member.name: member for member in tar}
            for name, member in members.items():
                key, _, extension = name.partition(".")
                if extension == "jpg":
                    label = members[f"{key}.cls"]
                    number = int(os.pread(descriptor, label.size, label.offset_data))
                    self._samples.append((descriptor, member.offset_data, member.size, number))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        data, label = self.read(index)
        return self._sampled(data), label

    def read(self, index: int) -> tuple[bytes, int]:
        """Return the bytes and the label of a sample."""
        descriptor, offset, size, label = self._samples[index]
        return os.pread(descriptor, size, offset), label

    def batches(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield infinite batches of images and labels, with a new permutation each epoch."""
        order: list[int] = []
        while True:
            while len(order) < batch:
                order += random.sample(range(len(self)), len(self))
            indices, order = order[:batch], order[batch:]
            images, labels = zip(*map(self.__getitem__, indices), strict=True)
            yield np.stack(images), np.array(labels)
