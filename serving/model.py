"""A bundle ready to answer: pictures or texts -> features -> verdicts.

It knows nothing of HTTP or of Ray, so `kway query` uses it in its own process.
"""

import logging
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from data.images.config import ImageConfig
from data.images.decode import MAX_PIXELS, crops_for_evaluation, decode
from data.loading.inputs import pad_tokens
from data.text.tokenizer import Tokenizer
from serving.answer import Question, answer
from serving.schemas import Answer
from trainer.bundle.bundle import Bundle, onnx_is_installed

Device = Literal["cpu", "cuda"]
Engine = Literal["torch", "onnxruntime"]

_log = logging.getLogger("kway.serving")
_ANY_TEXT = "Is this a text? "


class Model:
    """An opened bundle with its backbone, in float32, on the CPU or a GPU.

    `engine` is what computes features: onnxruntime on a CPU where the bundle has an ONNX backbone
    and the package is installed, else torch.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        max_pixels: int = MAX_PIXELS,
        device: Device = "cpu",
        engine: Engine | None = None,
        allow_imports: Collection[str] = (),
    ) -> None:
        """`engine` None: the best there is. onnxruntime takes as many threads as torch has now.

        Raises ValueError where there is no such device, or no such engine for it, and where torch
        would need a backbone that is not in `allow_imports`.
        """
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is cuda and torch finds no GPU here: give cpu")
        self.bundle = bundle
        self.device: Device = device
        self.reads = bundle.spec.reads
        # What one input is in the backbone's batch.
        self.crops: int = bundle.spec.image.crops if bundle.spec.image is not None else 1
        self._reader = open_reader(bundle, max_pixels=max_pixels)
        self.engine: Engine = engine or _best_engine(bundle, device)
        self._backbone = _backbone(bundle, self.engine, device, allow_imports)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        max_pixels: int = MAX_PIXELS,
        device: Device = "cpu",
        allow_imports: Collection[str] = (),
    ) -> "Model":
        """Open the bundle folder `path`; errors are those of `Bundle.open` and its `load_…`."""
        return cls(
            Bundle.open(path), max_pixels=max_pixels, device=device, allow_imports=allow_imports
        )

    def prepare(self, raw: bytes | str) -> Any:
        """A picture file's bytes, or a text, as this model reads it -> what `features` takes.

        Raises ValueError for what is wrong with it.
        """
        return self._reader.prepare(raw)

    @torch.inference_mode()
    def features(self, prepared: Sequence[Any]) -> Tensor:
        """Prepared inputs, whatever their sizes -> features [B, dim], in one forward pass.

        They come back to the CPU, where the rows are: a few rows' product costs less than a launch.
        """
        inputs = self._reader.collate(prepared)
        if self.device != "cpu":
            inputs = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        return self._backbone(inputs).float().cpu()

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


def _best_engine(bundle: Bundle, device: Device) -> Engine:
    if device != "cpu" or not bundle.has_onnx:
        return "torch"
    if not onnx_is_installed():
        _log.warning(
            "%s has an ONNX backbone and onnxruntime is not installed: torch computes instead, at "
            "about twice the time; install kway[onnx]",
            bundle.path.name,
        )
        return "torch"
    return "onnxruntime"


def check_imports(bundle: Bundle, device: Device, allow_imports: Collection[str]) -> None:
    """Raise ValueError where a `Model` would import what is not in `allow_imports`: onnxruntime
    needs no code of a backbone, torch does."""
    if device != "cpu" or not bundle.has_onnx or not onnx_is_installed():
        bundle.check_imports(allow_imports)


def _backbone(
    bundle: Bundle, engine: Engine, device: Device, allow_imports: Collection[str]
) -> Callable[[dict[str, Tensor]], Tensor]:
    if engine == "onnxruntime":
        if device != "cpu" or not bundle.has_onnx:
            raise ValueError(
                "engine onnxruntime needs the CPU, and a bundle of kway export --onnx: give torch"
            )
        return bundle.load_onnx_backbone(threads=torch.get_num_threads())
    return bundle.load_backbone(allow_imports=allow_imports).to(device)


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
        return ImageReader(bundle.spec.image, max_pixels)
    return TextReader(bundle.load_tokenizer())


class ImageReader:
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


class TextReader:
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
