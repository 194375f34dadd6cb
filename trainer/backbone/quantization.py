"""Converts an ONNX backbone to int8.

The quantization is static: the ranges of the activations come from samples, not from the batch that
is computed, so the features of an input do not depend on the other inputs of its batch. Weights
have one scale per channel. Only products with constant weights are quantized, not those of
attention.
"""

import importlib.util
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from data.messages import one_line

_NEEDS = ("onnx", "onnxruntime")


def write_int8(source: Path, inputs: Sequence[dict[str, Tensor]], file: Path) -> None:
    """Write the ONNX backbone `source` in int8 to `file`. `inputs` are batches of real samples.

    Raises ValueError if a package is missing or onnxruntime cannot convert the backbone.
    """
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"int8 requires {missing[0]}, which is not installed: install kway[onnx]")
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Samples(CalibrationDataReader):
        def __init__(self) -> None:
            self._remaining = iter(inputs)

        def get_next(self) -> object:
            return _arrays(next(self._remaining, None))

    try:
        with _quiet(), tempfile.TemporaryDirectory(prefix="kway-") as folder:
            prepared = Path(folder) / "prepared.onnx"
            quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
            quantize_static(
                str(prepared),
                str(file),
                Samples(),
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                extra_options={"MatMulConstBOnly": True},
            )
    except (ValueError, RuntimeError, TypeError, KeyError, IndexError) as error:
        raise ValueError(
            f"onnxruntime cannot convert this backbone to int8 ({one_line(error)}): use "
            "--precision bf16"
        ) from error


def _arrays(inputs: dict[str, Tensor] | None) -> object:
    """Return the inputs as arrays, with the crops of an image as images of their own."""
    if inputs is None:
        return None
    return {
        name: (tensor.flatten(0, 1) if tensor.ndim == 5 else tensor).numpy()
        for name, tensor in inputs.items()
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the messages that the converter logs to the root logger."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
