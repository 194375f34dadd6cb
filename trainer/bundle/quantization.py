"""Writes a bundle whose backbone runs in bf16 or int8 on CPUs (`kway quantize`).

The thresholds are computed again from the scores in the new precision, and the model card compares
these scores with those in float32.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from data.loading.batch import Batch
from data.progress import Report
from trainer.backbone.onnx_backbone import BF16, check_packages, write_int8, write_onnx
from trainer.backbone.precision import LowPrecision, check_device
from trainer.bundle.bundle import Bundle
from trainer.bundle.calibration import (
    Calibration,
    calibration_of,
    open_samples,
    scores_of_blocks,
)
from trainer.bundle.calibration_options import CalibrationOptions
from trainer.bundle.model_card import with_section
from trainer.bundle.spec import CARD, ONNX
from trainer.bundle.writing import rewrite_bundle

# Samples that set the ranges of int8 activations, spread over the split.
_NUM_RANGE_SAMPLES = 256


@dataclass(frozen=True)
class Quantization:
    """The calibration in the new precision, the top-1 accuracy in float32, the fraction of the
    samples with the same top-1 class, and the largest difference of a score.
    """

    calibration: Calibration
    float32_accuracy: float
    agreement: float
    largest_difference: float


def quantize(
    path: Path,
    shards: Path | str,
    out: Path,
    precision: LowPrecision,
    options: CalibrationOptions,
    *,
    progress: Report = lambda done, total: None,
) -> Quantization:
    """Write the bundle `path` in `precision` to `out`, with thresholds from labeled `shards`.

    Raises ValueError if `path` is not in float32, if the processor or the installed packages do
    not support the precision, and for the errors of `calibrate`, `write_onnx` and `write_int8`.
    """
    check_device(precision, "cpu")
    if precision == "int8":
        check_packages("--precision int8")
    with (
        Bundle.open(path) as bundle,
        open_samples(bundle, shards, options, progress) as samples,
        tempfile.TemporaryDirectory(prefix="kway-") as folder,
    ):
        if bundle.spec.precision != "float32":
            raise ValueError(f"{path} is in {bundle.spec.precision}: pass the bundle in float32")
        every = max(1, len(samples.split) // _NUM_RANGE_SAMPLES)
        seen, kept = 0, []

        def keep(batch: Batch) -> None:
            nonlocal seen
            for row in range(-seen % every, batch.num_rows, every):
                kept.append(
                    {name: part[row : row + 1].clone() for name, part in batch.inputs.items()}
                )
            seen += batch.num_rows

        before, _ = samples.features(each_batch=keep)
        onnx = None
        if precision == "int8":
            source, onnx = path / ONNX, Path(folder) / "int8.onnx"
            if not bundle.has_onnx:
                source = Path(folder) / ONNX
                backbone = bundle.load_backbone(allow_imports=options.allow_imports)
                write_onnx(backbone, bundle.spec.image, source, remedy=BF16)
            write_int8(source, kept, onnx)
        after, labels = samples.features(precision=precision, onnx=onnx)
        old, new = (calibration_of(bundle, each, labels, options) for each in (before, after))
        pairs = zip(*(scores_of_blocks(bundle, each) for each in (before, after)), strict=True)
        found = Quantization(
            new,
            float32_accuracy=old.accuracy,
            agreement=float((old.predicted == new.predicted).double().mean()),
            largest_difference=max(
                float((one - other).abs().max()) for (_, one, _), (_, other, _) in pairs
            ),
        )
        card = (path / CARD).read_text(encoding="utf-8")
        card = with_section(card, _precision_section(precision, found))
        rewrite_bundle(
            path,
            out,
            thresholds=found.calibration.thresholds,
            model_card=samples.model_card(card, found.calibration),
            precision=precision,
            onnx=onnx,
        )
    return found


def _precision_section(precision: str, found: Quantization) -> str:
    return f"""## Precision

The backbone runs in {precision} on CPUs, and the thresholds belong to its scores. Compared with
float32 on {found.calibration.num_samples} samples:

| measure | value |
|---|---|
| {found.calibration.measure}, {precision} | {found.calibration.accuracy:.4f} |
| {found.calibration.measure}, float32 | {found.float32_accuracy:.4f} |
| samples with the same top-1 class | {found.agreement:.4f} |
| largest difference of a score | {found.largest_difference:.4g} |
"""
