"""Code that users without kway would write to turn tars into batches.

This module does not import kway. Images are JPEGs, of which a random crop is resized to 224 x 224,
or PNGs of 32 x 32 pixels, which are shifted by up to 4 pixels. Half of the images are flipped, and
batches are uint8 [B, 3, H, W]. Texts are encoded by the tokenizers library in one thread, and
padded to the longest text of a batch, rounded up to a multiple of 8.
"""

import ctypes
import os
import random
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
import tokenizers
import webdataset

SIDE, SMALL_SIDE, PAD = 224, 32, 4
_MOST_BYTES = 64 << 20  # of a decoded crop
_MULTIPLE = 8

# Bytes of an image -> uint8 [3, H, W].
Decode = Callable[[bytes], np.ndarray]
Arrays = tuple[np.ndarray, ...]
Samples = list[tuple[bytes, int]]  # content and label
Collate = Callable[[Samples], Arrays]


# ------------------------------------------------------------------------ tars


def loop(tars: Sequence[str], suffix: str, size: int, collate: Collate) -> Iterator[Arrays]:
    """Yield infinite batches, with a new permutation each epoch: a hand-written loop with a list of
    offsets and one `pread` per sample."""
    samples = []  # descriptor, size, offset, label
    for path in tars:
        descriptor = os.open(path, os.O_RDONLY)
        with tarfile.open(path) as tar:
            members = {member.name: member for member in tar}
        for name, member in members.items():
            key, _, extension = name.partition(".")
            if extension == suffix:
                label = members[f"{key}.cls"]
                number = int(os.pread(descriptor, label.size, label.offset_data))
                samples.append((descriptor, member.size, member.offset_data, number))
    order: list[tuple[int, int, int, int]] = []
    while True:
        while len(order) < size:
            order += random.sample(samples, len(samples))
        batch, order = order[:size], order[size:]
        yield collate([(os.pread(*place), label) for *place, label in batch])


def webdataset_loop(
    tars: Sequence[str], suffix: str, size: int, collate: Collate
) -> Iterator[Arrays]:
    """Return infinite batches in the order of the tars."""
    dataset = (
        webdataset.WebDataset(list(tars), shardshuffle=False)
        .to_tuple(suffix, "cls")
        .map_tuple(bytes, int)
        .batched(size, collation_fn=collate, partial=False)
        .repeat()
    )
    return iter(dataset)


# ------------------------------------------------------------------------ images


def images(decode: Decode) -> Collate:
    """Return a function that decodes a batch."""

    def collate(samples: Samples) -> Arrays:
        pixels = np.stack([decode(data) for data, _ in samples])
        return pixels, np.array([label for _, label in samples])

    return collate


def compiled_crop_and_skip(folder: Path) -> Decode | None:
    """Compile `crop_and_skip.c` in `folder` and return a function that decodes only the crop, with
    libjpeg-turbo's fastest settings.

    Returns None if there is no C compiler, or if libjpeg-turbo's development files are missing.
    """
    source, library = Path(__file__).with_name("crop_and_skip.c"), folder / "crop_and_skip.so"
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    command = [compiler, "-O3", "-shared", "-fPIC", "-o", library, source, "-ljpeg", "-lm"]
    if subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
        return None
    decoder, state = ctypes.CDLL(str(library)), (ctypes.c_ushort * 3)(1, 2, 3)
    pixels, found = np.empty(_MOST_BYTES, np.uint8), (ctypes.c_int * 4)()
    into, capacity = ctypes.c_void_p(pixels.ctypes.data), ctypes.c_ulong(_MOST_BYTES)

    def decode(data: bytes) -> np.ndarray:
        size = ctypes.c_ulong(len(data))
        assert not decoder.decode_crop(data, size, state, into, capacity, found)
        height, width, columns, before = found
        rows = pixels[: height * columns * 3].reshape(height, columns, 3)
        return _finished(rows[:, before : before + width])

    return decode


def with_simplejpeg(data: bytes) -> np.ndarray:
    """Decode whole images with libjpeg-turbo at its fastest settings."""
    image = simplejpeg.decode_jpeg(data, "RGB", fastdct=True, fastupsample=True)
    height, width = image.shape[:2]
    for _ in range(10):  # as in torchvision's RandomResizedCrop
        area, ratio = height * width * random.uniform(0.08, 1), np.exp(random.uniform(*_LOG_RATIO))
        box_width, box_height = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < box_width <= width and 0 < box_height <= height:
            break
    else:
        box_width = box_height = min(height, width)
    top, left = random.randint(0, height - box_height), random.randint(0, width - box_width)
    return _finished(image[top : top + box_height, left : left + box_width])


_LOG_RATIO = float(np.log(3 / 4)), float(np.log(4 / 3))


def _finished(crop: np.ndarray) -> np.ndarray:
    """Resize bilinearly, after averaging blocks if a side is at least twice as long, as kway does;
    flip half of the images."""
    height, width = crop.shape[:2]
    rows, columns = max(height // SIDE, 1), max(width // SIDE, 1)
    if rows > 1 or columns > 1:
        whole = crop[: height // rows * rows, : width // columns * columns]
        size = width // columns, height // rows
        crop = cv2.resize(whole, size, interpolation=cv2.INTER_AREA)
    return _flipped(cv2.resize(crop, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR))


def shifted_png(data: bytes) -> np.ndarray:
    """Decode a small PNG with OpenCV."""
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    padded = cv2.copyMakeBorder(image, PAD, PAD, PAD, PAD, cv2.BORDER_CONSTANT)
    top, left = random.randint(0, 2 * PAD), random.randint(0, 2 * PAD)
    return _flipped(padded[top : top + SMALL_SIDE, left : left + SMALL_SIDE])


def _flipped(image: np.ndarray) -> np.ndarray:
    return (cv2.flip(image, 1) if random.random() < 0.5 else image).transpose(2, 0, 1)


# ------------------------------------------------------------------------ texts


class Encoder:
    """A tokenizer of the tokenizers library, opened from a folder."""

    def __init__(self, folder: Path, max_length: int) -> None:
        self._backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._backend.enable_truncation(max_length)
        self._backend.no_padding()
        self._pad_id, self._max_length = self._backend.token_to_id("[PAD]"), max_length

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token IDs of each text, with special tokens."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts)]

    def collate(self, samples: Samples) -> Arrays:
        """Return token IDs, an attention mask and labels, int64 each."""
        texts, labels = zip(*samples, strict=True)
        ids = self.ids([text.decode() for text in texts])
        lengths = np.array([len(row) for row in ids])
        width = min(-(-int(lengths.max()) // _MULTIPLE) * _MULTIPLE, self._max_length)
        padded = np.full((len(ids), width), self._pad_id, np.int64)
        for into, row in zip(padded, ids, strict=True):
            into[: len(row)] = row
        return padded, (np.arange(width) < lengths[:, None]).astype(np.int64), np.array(labels)
