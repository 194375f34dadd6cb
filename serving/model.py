"""A loaded model: images or texts -> features -> verdicts.

It does not depend on HTTP or Ray, so `kway query` can use it in-process.
"""

import logging
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from data.extras import install_command
from data.images.config import ImageConfig
from data.images.decode import MAX_PIXELS, decode, for_evaluation
from data.loading.inputs import pad_tokens
from data.text.tokenizer import Tokenizer
from serving.answer import Query, answer
from serving.schemas import Answer
from trainer.backbone.onnx_backbone import OnnxBackbone
from trainer.backbone.precision import check_device, fold_batch_norms, onnx_is_installed
from trainer.bundle.bundle import Bundle
from trainer.bundle.spec import ONNX

Device = Literal["cpu", "cuda"]
Engine = Literal["torch", "onnxruntime"]

_log = logging.getLogger("kway.serving")
_EXAMPLE_TEXT = "Is this a text? "


class Model:
    """An opened bundle with its backbone, in the precision of the bundle, on the CPU or a GPU.

    `engine` is the library that computes features: onnxruntime for a bundle in int8, or if the
    device is the CPU, the bundle has an ONNX backbone and the package is installed; otherwise
    torch. onnxruntime uses as many threads as torch is set to use.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        max_pixels: int = MAX_PIXELS,
        device: Device = "cpu",
        allow_imports: Collection[str] = (),
    ) -> None:
        """Raises ValueError if this machine cannot run the bundle on the device, or if torch would
        have to import a backbone that is not in `allow_imports`."""
        check_device(bundle.spec.precision, device)
        self.bundle = bundle
        self.device: Device = device
        self.reads = bundle.spec.reads
        # Rows that one input occupies in the backbone's batch.
        self.crops: int = bundle.spec.image.crops if bundle.spec.image is not None else 1
        self._reader = open_reader(bundle, max_pixels=max_pixels)
        self.engine: Engine = best_engine(bundle, device)
        self._backbone = self._load_backbone(allow_imports)

    def _load_backbone(
        self, allow_imports: Collection[str]
    ) -> Callable[[dict[str, Tensor]], Tensor]:
        bundle, device = self.bundle, self.device
        examples = self._reader.collate(self._reader.examples())
        if bundle.spec.precision != "float32":
            return bundle.load_as_calibrated(examples, device=device, allow_imports=allow_imports)
        if self.engine == "onnxruntime":
            return OnnxBackbone(bundle.path / ONNX)
        backbone = bundle.load_backbone(allow_imports=allow_imports)
        if device == "cpu":
            fold_batch_norms(backbone, examples)
        return backbone.to(device)

    @classmethod
    def open(cls, path: Path, **options: Any) -> Self:
        """Open the bundle folder `path`. `options` are those of the constructor."""
        return cls(Bundle.open(path), **options)

    def prepare(self, raw: bytes | str) -> Any:
        """Decode an image file (bytes) or a text to an input of `features`.

        Raises ValueError if the input is invalid.
        """
        return self._reader.prepare(raw)

    @torch.inference_mode()
    def features(self, prepared: Sequence[Any]) -> Tensor:
        """Compute the features [B, dim] of B prepared inputs in one forward pass.

        The result is on the CPU, where the class rows are: multiplying by a few rows costs less
        than a kernel launch.
        """
        inputs = self._reader.collate(prepared)
        if self.device != "cpu":
            inputs = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        return self._backbone(inputs).float().cpu()

    def answer(self, prepared: Sequence[Any], query: Query) -> Answer:
        """Compute the verdicts for prepared inputs in one forward pass."""
        return answer(self.bundle, self.features(prepared), query)

    def self_check(self) -> None:
        """Run example inputs, including the longest possible one. Raises ValueError if the model
        cannot process them or returns a logit that is not finite."""
        try:
            found = self.answer(self._reader.examples(), Query((0,)))
        except (RuntimeError, IndexError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"{self.bundle.path} cannot process its example inputs ({reason}). The files of "
                "the bundle are inconsistent. Export the bundle again"
            ) from error
        for score in (result.verdicts[0].score for result in found.results):
            if not math.isfinite(score):
                raise ValueError(
                    f"{self.bundle.path} returns a score of {score} for an example input. Either "
                    "its weights are corrupted or training diverged. Export the bundle again"
                )


def best_engine(bundle: Bundle, device: Device) -> Engine:
    """Return the fastest available engine, or the only one for the precision of the bundle."""
    if bundle.spec.precision == "int8":
        return "onnxruntime"
    if device != "cpu" or not bundle.has_onnx:
        return "torch"
    if not onnx_is_installed():
        _log.warning(
            "%s has an ONNX backbone, but onnxruntime is not installed. Falling back to torch, "
            "which takes about twice as long. To install onnxruntime, run %s",
            bundle.path.name,
            install_command("onnx"),
        )
        return "torch"
    return "onnxruntime"


def check_imports(bundle: Bundle, device: Device, allow_imports: Collection[str]) -> None:
    """Raise ValueError if a `Model` would import code that is not in `allow_imports`. torch
    requires the code of the backbone, but onnxruntime does not."""
    if device != "cpu" or not bundle.has_onnx or not onnx_is_installed():
        bundle.check_imports(allow_imports)


class ImageReader:
    """Image files -> uint8 pixels [C, size, size], or [crops, C, size, size].

    Like `TextReader`, it prepares inputs, as sent by clients, combines them into a batch of
    backbone inputs, and has examples that every model must be able to process.
    """

    def __init__(self, image: ImageConfig, max_pixels: int) -> None:
        self._image = image
        self._max_pixels = max_pixels

    def prepare(self, raw: Any) -> Tensor:
        """Decode an image. Raises ValueError if the bytes are not a valid image, or if the image
        has too many pixels or an extreme aspect ratio."""
        return self._crops(decode(raw, self._image.channels, self._max_pixels))

    def collate(self, prepared: Sequence[Any]) -> dict[str, Tensor]:
        return {"pixel_values": torch.stack(list(prepared))}

    def examples(self) -> list[Tensor]:
        side = self._image.resize or self._image.size
        return [self._crops(np.full((side, side, self._image.channels), 128, np.uint8))]

    def _crops(self, image: np.ndarray) -> Tensor:
        return torch.as_tensor(for_evaluation(image, self._image))


class TextReader:
    """Texts -> token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prepare(self, raw: Any) -> list[int]:
        """Tokenize a text. Raises ValueError if the text is not valid Unicode."""
        return self._tokenizer.encode([raw])[0]

    def collate(self, prepared: Sequence[Any]) -> dict[str, Tensor]:
        return pad_tokens(prepared, self._tokenizer.pad_id, max_length=self._tokenizer.max_length)

    def examples(self) -> list[list[int]]:
        """Return a short text and a text that is truncated to `max_length` tokens."""
        return self._tokenizer.encode([_EXAMPLE_TEXT, _EXAMPLE_TEXT * self._tokenizer.max_length])


Reader = ImageReader | TextReader


def open_reader(bundle: Bundle, *, max_pixels: int = MAX_PIXELS) -> Reader:
    """Return the reader for the model in `bundle`. Raises the same exceptions as
    `Bundle.load_tokenizer`."""
    if bundle.spec.image is not None:
        return ImageReader(bundle.spec.image, max_pixels)
    return TextReader(bundle.load_tokenizer())
