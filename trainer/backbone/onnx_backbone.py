"""The backbone in ONNX format. Export writes it and compares it with torch; serving runs it with
onnxruntime.

On CPUs, onnxruntime takes about half the time of eager torch for ResNet-50. The `onnx` extra
installs all packages that export needs; serving needs only onnxruntime.
"""

import copy
import importlib.util
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data.extras import install_command
from data.images.config import ImageConfig
from data.messages import one_line
from trainer.backbone.backbone import Backbone

BF16 = "use --precision bf16"
# The operations that are quantized to int8 in networks with attention.
_PRODUCTS = ("Conv", "Gemm", "MatMul")
_ATTENTION = ("Attention", "Softmax")
# The maximum difference from torch's features, relative to the largest feature.
TOLERANCE = 1e-4
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_IMAGES, _TEXTS = ("pixel_values",), ("input_ids", "attention_mask")
# Batch sizes and text lengths for the comparison. They differ from those of the traced inputs.
_COMPARED_SHAPES = ((1, 5), (3, 2))


class OnnxBackbone:
    """Computes the same features [B, dim] as `Backbone` with onnxruntime, on the CPU, with as many
    threads as torch is set to use.
    """

    def __init__(self, file: Path) -> None:
        """Raises ValueError if onnxruntime cannot load the file."""
        import onnxruntime
        from onnxruntime.capi import onnxruntime_pybind11_state as state

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        try:
            self._session = onnxruntime.InferenceSession(
                file, options, providers=["CPUExecutionProvider"]
            )
        except (
            state.Fail,
            state.InvalidArgument,
            state.InvalidGraph,
            state.InvalidProtobuf,
            state.NotImplemented,
        ) as error:
            raise ValueError(
                f"{file} is damaged or not supported by this onnxruntime ({one_line(error)}): "
                "export the run again"
            ) from error
        self._inputs = [node.name for node in self._session.get_inputs()]

    def __call__(self, inputs: dict[str, Tensor]) -> Tensor:
        pixels = inputs.get("pixel_values")
        if pixels is not None and pixels.ndim == 5:
            crops = self._run({"pixel_values": pixels.flatten(0, 1)})
            return crops.unflatten(0, pixels.shape[:2]).mean(1)
        return self._run(inputs)

    def _run(self, inputs: dict[str, Tensor]) -> Tensor:
        arrays = {name: inputs[name].numpy() for name in self._inputs}
        return torch.from_numpy(self._session.run(None, arrays)[0])


class _Positional(nn.Module):
    """A backbone with positional inputs, which become the inputs of the ONNX graph."""

    def __init__(self, backbone: Backbone, names: tuple[str, ...]) -> None:
        super().__init__()
        self.backbone, self.names = backbone, names

    def forward(self, *tensors: Tensor) -> Tensor:
        features: Tensor = self.backbone(dict(zip(self.names, tensors, strict=True)))
        return features


def check_packages(option: str) -> None:
    """Raise ValueError, naming the command's `option`, if a package of the `onnx` extra is
    missing.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"{option} requires {missing[0]}, which is not installed: run {install_command('onnx')}"
        )


def write_onnx(
    backbone: Backbone,
    image: ImageConfig | None,
    file: Path,
    *,
    remedy: str = "export without --onnx",
) -> None:
    """Write `backbone` to `file` for any batch size and text length. Image models require
    `image`.

    Raises ValueError, with the `remedy`, if torch cannot export the network, or if the features
    that onnxruntime computes for random inputs differ from torch's by more than `TOLERANCE`.
    """
    check_packages("--onnx")
    plain = _plain(backbone)
    names = _TEXTS if backbone.modality == "text" else _IMAGES
    dynamic = {0: torch.export.Dim.DYNAMIC}
    if names is _TEXTS:
        dynamic[1] = torch.export.Dim.DYNAMIC
    module, traced = _Positional(plain, names), _random_inputs(plain, image, 2, 4)
    try:
        with _quiet():
            program = torch.onnx.export(
                module.eval(),
                tuple(traced.values()),
                dynamo=True,
                dynamic_shapes=((dynamic,) * len(names),),
                input_names=names,
                output_names=["features"],
                verbose=False,
            )
            assert program is not None
            program.save(file, external_data=False)
    except (torch.onnx.errors.OnnxExporterError, ValueError) as error:
        reason = one_line(error.__cause__ or error)
        raise ValueError(
            f"torch cannot export this backbone to ONNX ({reason}): {remedy}"
        ) from error
    _compare(plain, image, file, remedy)


def _plain(backbone: Backbone) -> Backbone:
    """Return a copy of the backbone as it is served: in float32, on the CPU, without training
    settings.
    """
    plain = copy.deepcopy(backbone).to("cpu", torch.float32).eval().requires_grad_(False)
    plain.precision, plain.channels_last = None, False
    return plain


def _random_inputs(
    backbone: Backbone, image: ImageConfig | None, batch: int, length: int
) -> dict[str, Tensor]:
    """Return random images, or random texts of which one is shorter than the others."""
    generator = torch.Generator().manual_seed(batch)
    if backbone.modality == "image":
        assert image is not None
        shape = (batch, image.channels, image.size, image.size)
        pixels = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        return {"pixel_values": pixels}
    ids = torch.randint(backbone.settings.vocab_size, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, length - 1 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def _compare(backbone: Backbone, image: ImageConfig | None, file: Path, remedy: str) -> None:
    session = OnnxBackbone(file)
    for batch, length in _COMPARED_SHAPES:
        inputs = _random_inputs(backbone, image, batch, length)
        expected, found = backbone(inputs), session(inputs)
        error = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
        if not error <= TOLERANCE:  # also true for NaN
            raise ValueError(
                f"onnxruntime's features differ from torch's by {error:.1e} of the largest "
                f"feature, more than {TOLERANCE:.0e}: {remedy}"
            )


def write_int8(source: Path, inputs: Sequence[dict[str, Tensor]], file: Path) -> None:
    """Write the ONNX backbone `source` in int8 to `file`. `inputs` are batches of real samples.

    The ranges of the activations come from samples, not from the batch that is computed. Weights
    have one scale per channel. Products are quantized only if their weights are constant. In
    convolutional networks, the operations between the products are quantized too, which makes them
    faster. In networks with attention, they are not: the attention mask contains the lowest float,
    so one scale for the masked logits would round all of them to zero.

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


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress output that is intended for developers of the exporter and the converter: log
    messages, warnings, and the graph that torch prints if it cannot export it.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)` is deprecated")
            warnings.filterwarnings("ignore", "While compiling, we found certain side effects")
            yield
    finally:
        logging.disable(disabled)
