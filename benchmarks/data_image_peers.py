"""Code that users without kway would write to turn tars of JPEGs into batches.

This module does not import kway. It contains pipelines of webdataset and grain;
`benchmarks/data_tar_samples.py` is a map-style dataset of the same tars. Each uses a decoder
(Pillow, simplejpeg, OpenCV or libjpeg-turbo), takes a random crop, flips half of the images and
produces uint8 batches [B, 3, 224, 224]. All of them resize crops as kway does, with the same OpenCV
functions.
"""

import ctypes
import io
import math
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
import webdataset
from PIL import Image

from benchmarks.data_tar_samples import TarSamples

SIDE = 224
_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
_ATTEMPTS = 10
# libjpeg-turbo begins a row at a block, which is up to 32 columns wide.
_BLOCK = 32

# Only local tars are read, so disable webdataset's URLs that run shell commands.
webdataset.utils.enforce_security = True

# Bytes of a JPEG -> uint8 [3, 224, 224].
Sampled = Callable[[bytes], np.ndarray]


def with_pillow(data: bytes) -> np.ndarray:
    """Decode with Pillow."""
    return _cropped(np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def with_simplejpeg(data: bytes) -> np.ndarray:
    """Decode with libjpeg-turbo at its fastest settings."""
    return _cropped(simplejpeg.decode_jpeg(data, "RGB", fastdct=True, fastupsample=True))


def with_opencv(data: bytes) -> np.ndarray:
    """Decode with OpenCV."""
    return _cropped(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB))


def compiled_crop_and_skip(folder: Path) -> tuple[Sampled, Sampled] | None:
    """Compile `crop_and_skip.c` in `folder` and return two functions that decode only the crop:
    with libjpeg-turbo's fastest settings, and with its default settings, which are more accurate.

    Returns None if there is no C compiler, or if libjpeg-turbo's development files are missing.
    """
    source, library = Path(__file__).with_name("crop_and_skip.c"), folder / "crop_and_skip.so"
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    command = [compiler, "-O3", "-shared", "-fPIC", "-o", library, source, "-ljpeg"]
    if subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
        return None
    decoder = ctypes.CDLL(str(library))
    return partial(_with_crop_and_skip, decoder, 1), partial(_with_crop_and_skip, decoder, 0)


def _with_crop_and_skip(library: ctypes.CDLL, fast: int, data: bytes) -> np.ndarray:
    size = ctypes.c_ulong(len(data))
    sides = ctypes.c_int(), ctypes.c_int()
    assert library.image_size(data, size, *map(ctypes.byref, sides)) == 0
    box = _box(sides[0].value, sides[1].value)
    rows = np.empty((box[2], box[3] + _BLOCK, 3), np.uint8)
    pointer, stride = ctypes.c_void_p(rows.ctypes.data), ctypes.c_long(rows.strides[0])
    column = library.decode_box(data, size, *box, fast, pointer, stride)
    assert column >= 0
    return _finished(rows[:, column : column + box[3]])


def _cropped(image: np.ndarray) -> np.ndarray:
    top, left, height, width = _box(*image.shape[:2])
    return _finished(image[top : top + height, left : left + width])


def _finished(crop: np.ndarray) -> np.ndarray:
    crop = _resized(crop)
    if random.random() < 0.5:
        crop = cv2.flip(crop, 1)
    return crop.transpose(2, 0, 1)


def _resized(crop: np.ndarray) -> np.ndarray:
    """Resize bilinearly, after averaging blocks if a side is at least twice as long."""
    height, width = crop.shape[:2]
    rows, columns = max(height // SIDE, 1), max(width // SIDE, 1)
    if rows > 1 or columns > 1:
        whole = crop[: height // rows * rows, : width // columns * columns]
        size = width // columns, height // rows
        crop = cv2.resize(whole, size, interpolation=cv2.INTER_AREA)
    return cv2.resize(crop, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)


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
    tars: Sequence[str], sampled: Sampled, batch: int, extension: str = "jpg"
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return infinite batches of images and labels, in the order of the tars."""
    dataset = (
        webdataset.WebDataset(list(tars), shardshuffle=False)
        .to_tuple(extension, "cls")
        .map_tuple(sampled, int)
        .batched(batch, partial=False)
        .repeat()
    )
    return iter(dataset)


def grain_batches(
    tars: Sequence[str], sampled: Sampled, batch: int, extension: str = "jpg"
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return infinite batches of images and labels in random order."""
    import grain  # takes a second

    images = TarSamples(tars, sampled, extension)
    dataset = grain.MapDataset.source(images).seed(0).shuffle().repeat()
    # Its threads would not reduce the CPU time.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(dataset.batch(batch).to_iter_dataset(options))
