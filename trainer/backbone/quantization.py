"""Converts an ONNX backbone to int8.

The quantization is static: the ranges of the activations come from samples, not from the batch that
is computed. Weights have one scale per channel. Products are quantized only if their weights are
constant.

In convolutional networks, the operations between the products are quantized too, which makes them
faster. In networks with attention, they are not: the attention mask contains the lowest float, so
one scale for the masked logits would round all of them to zero.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from data.messages import one_line
from trainer.backbone.onnx_backbone import quiet

BF16 = "use --precision bf16"
_PRODUCTS = ("Conv", "Gemm", "MatMul")
_ATTENTION = ("Attention", "Softmax")


def write_int8(source: Path, inputs: Sequence[dict[str, Tensor]], file: Path) -> None:
    """Write the ONNX backbone `source` in int8 to `file`. `inputs` are batches of real samples.

    Raises ValueError if onnxruntime cannot convert the backbone.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Samples(CalibrationDataReader):
        def __init__(self) -> None:
            self._remaining = iter(inputs)

        def get_next(self) -> object:
            if (batch := next(self._remaining, None)) is None:
                return None
            # The crops of an image are images of their own.
            crops = {k: each.flatten(0, 1) if each.ndim == 5 else each for k, each in batch.items()}
            return {name: tensor.numpy() for name, tensor in crops.items()}

    try:
        with quiet(), tempfile.TemporaryDirectory(prefix="kway-") as folder:
            prepared = Path(folder) / "prepared.onnx"
            quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
            quantize_static(
                str(prepared),
                str(file),
                Samples(),
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                **_selection(onnx.load(prepared).graph),
            )
    except (ValueError, RuntimeError, TypeError, KeyError, IndexError) as error:
        raise ValueError(
            f"onnxruntime cannot convert this backbone to int8 ({one_line(error)}): {BF16}"
        ) from error


def _selection(graph: Any) -> dict[str, Any]:
    """Return the options that select the operations to quantize."""
    constants = {one.name for one in graph.initializer}
    variable = [n.name for n in graph.node if n.op_type == "MatMul" and n.input[1] not in constants]
    has_attention = any(node.op_type in _ATTENTION for node in graph.node)
    return {
        "op_types_to_quantize": _PRODUCTS if has_attention else None,
        "nodes_to_exclude": variable,
    }
