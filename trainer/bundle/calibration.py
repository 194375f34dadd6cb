"""Adds thresholds to a bundle from labeled shards (`kway calibrate`).

The backbone computes the features of a split, and the classes are scored in blocks, which are read
from disk. Memory therefore holds the features and the scores of one block.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.config import DataConfig, TextConfig
from data.loading.batch import Batch
from data.loading.loader import EvalLoader
from data.progress import Report
from data.shards.manifest import Manifest
from data.shards.split import Split, open_split
from heads import LabelSets
from heads.label_sets import class_ids_of, concatenate_labels
from heads.losses import score
from heads.slc import positions_of_labels
from trainer.backbone.config import Precision
from trainer.backbone.precision import check_device
from trainer.bundle.bundle import Bundle
from trainer.bundle.calibration_options import CalibrationOptions
from trainer.bundle.model_card import thresholds_section, with_section
from trainer.bundle.spec import CARD, TOKENIZER
from trainer.bundle.threshold_file import ClassThresholds
from trainer.bundle.writing import rewrite_bundle
from trainer.evaluation.class_scores import count_reached
from trainer.promises import make_promises
from trainer.promises.class_groups import groups_of_rows
from trainer.task import labels_of

# Memory for the scores of a block, of which a few copies exist.
_BLOCK_BYTES = 64 * 2**20
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class Calibration:
    """The new thresholds, and what the samples show about the model.

    num_classes: the number of classes with samples. accuracy: the fraction of the samples whose
    class, or one of them, has the highest logit; `measure` is its name. predicted: the class [N]
    with the highest logit of each sample.
    """

    thresholds: ClassThresholds
    num_samples: int
    num_classes: int
    measure: str
    accuracy: float
    predicted: Tensor


def calibrate(
    path: Path,
    shards: Path | str,
    out: Path,
    options: CalibrationOptions,
    *,
    progress: Report = lambda done, total: None,
) -> Calibration:
    """Write the bundle `path` with thresholds from labeled `shards` to `out`, which may be `path`.

    Raises ValueError if the shards contain other inputs than the model reads, classes that the
    bundle does not have, or no samples, and if this machine cannot run the bundle on the device.
    """
    with Bundle.open(path) as bundle:
        check_device(bundle.spec.precision, options.device)
        with open_samples(bundle, shards, options, progress) as samples:
            features, labels = samples.features()
            found = calibration_of(bundle, features, labels, options)
            card = samples.model_card((path / CARD).read_text(encoding="utf-8"), found)
    rewrite_bundle(path, out, thresholds=found.thresholds, model_card=card)
    return found


@dataclass(frozen=True)
class LabeledSamples:
    """A split of labeled shards, as inputs of a bundle's backbone. `class_ids` are the bundle's IDs
    of the classes of the shards.
    """

    bundle: Bundle
    data: DataConfig
    manifest: Manifest
    split: Split
    class_ids: Tensor
    options: CalibrationOptions
    progress: Report

    @torch.inference_mode()
    def features(
        self,
        *,
        precision: Precision | None = None,
        onnx: Path | None = None,
        each_batch: Callable[[Batch], None] = lambda batch: None,
    ) -> tuple[Tensor, Tensor | LabelSets]:
        """Return the features [N, dim] and the labels [N] or label sets, in the bundle's precision
        or in another one (see `Bundle.load_as_calibrated`). Labels are IDs of the bundle.
        """
        device = torch.device(self.options.device)
        backbone, features, done = None, [], 0
        labels: list[Tensor | LabelSets] = []
        for batch in EvalLoader(self.split, self.data, batch=self.options.batch, device=device):
            each_batch(batch)
            backbone = backbone or self.bundle.load_as_calibrated(
                batch.inputs,
                device=self.options.device,
                allow_imports=self.options.allow_imports,
                precision=precision,
                onnx=onnx,
            )
            features.append(backbone(batch.inputs).float().cpu())
            labels.append(labels_of(batch).to("cpu"))
            done += batch.num_rows
            self.progress(done, len(self.split))
        if not features:
            raise ValueError(f"split {self.options.split} is empty: choose a split with samples")
        found = concatenate_labels(labels)
        if isinstance(found, LabelSets):
            return torch.cat(features), found.mapped(self.class_ids)
        return torch.cat(features), self.class_ids[found]

    def model_card(self, card: str, found: Calibration) -> str:
        """Return a model card with the section about the thresholds from these samples."""
        section = (
            f"{thresholds_section(found.thresholds)}\nMeasured on {found.num_samples} samples of "
            f"split `{self.options.split}` of {self.manifest.source}: {found.measure} "
            f"{found.accuracy:.4f}.\n"
        )
        return with_section(card, section)


@contextmanager
def open_samples(
    bundle: Bundle,
    shards: Path | str,
    options: CalibrationOptions,
    progress: Report,
) -> Iterator[LabeledSamples]:
    """Open the split of `shards` that the options name. Raises ValueError if the model of the
    bundle does not read them or does not have one of their classes.
    """
    spec, manifest = bundle.spec, Manifest.load(shards)
    stored = "texts" if manifest.modality == "text" else "images"
    if stored != spec.reads:
        raise ValueError(
            f"{shards} contains {stored}, but the model of {bundle.path} reads {spec.reads}: pass "
            "other shards"
        )
    text = None
    if spec.text is not None:
        tokenizer = str(bundle.path / TOKENIZER)
        text = TextConfig(tokenizer=tokenizer, max_length=spec.text.max_length)
    image = {} if spec.image is None else {"image": spec.image}
    data = DataConfig(
        shards=shards, eval_split=options.split, text=text, workers=options.workers, **image
    )
    with open_split(shards, options.split, manifest=manifest) as split:
        manifest.check_labeled(options.split)
        ids = torch.from_numpy(_class_ids(bundle, manifest, split))
        yield LabeledSamples(bundle, data, manifest, split, ids, options, progress)


def _class_ids(bundle: Bundle, manifest: Manifest, split: Split) -> NDArray[np.int64]:
    """Return the bundle's ID of each class of the shards, or -1 for a class without samples that
    the bundle does not have.
    """
    names = manifest.class_names
    found = bundle.classes.find_all(names)
    unknown = [names[number] for number in np.unique(split.labels) if found[number] < 0]
    if unknown:
        shown = ", ".join(repr(name) for name in unknown[:_NAMES_SHOWN])
        near = bundle.classes.nearest(unknown[0], 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(
            f"{bundle.path} does not have {len(unknown)} classes of the shards, such as {shown}"
            f"{hint}: rename them in the shards, or, for an imported model, in the bundle with "
            "`kway import --class-names`"
        )
    return found.astype(np.int64)


def calibration_of(
    bundle: Bundle, features: Tensor, labels: Tensor | LabelSets, options: CalibrationOptions
) -> Calibration:
    """Return the thresholds for features [N, dim] and labels [N] or label sets, whose classes are
    IDs of the bundle."""
    label_ids = class_ids_of(labels)
    own, best = (torch.full((len(each),), -torch.inf) for each in (label_ids, labels))
    predicted = torch.zeros(len(labels), dtype=torch.int64)
    for ids, scores, logits in scores_of_blocks(bundle, features):
        found, *at = positions_of_labels(labels, ids)
        own[found] = scores[tuple(at)]
        highest, column = logits.max(1)
        better = highest > best  # a tie goes to the lowest class ID
        best[better], predicted[better] = highest[better], ids[column[better]]
    groups = groups_of_rows(bundle.blocks, bundle.spec.num_classes, bundle.spec.dim)
    promises = make_promises(
        own.numpy(), label_ids.numpy(), groups, options.recalls, options.confidence
    )
    cutoffs, row_of_class = map(torch.from_numpy, (promises.thresholds, promises.row_of_class))
    reached = [
        count_reached(scores, labels, ids, cutoffs[row_of_class[ids]]).int()
        for ids, scores, _ in scores_of_blocks(bundle, features)
    ]
    if isinstance(labels, LabelSets):
        measure, correct = "precision at 1", labels.contain(predicted.unsqueeze(1))
    else:
        measure, correct = "top-1 accuracy", predicted == labels
    return Calibration(
        ClassThresholds.of_promises(promises, torch.cat(reached).numpy()),
        num_samples=len(labels),
        num_classes=len(label_ids.unique()),
        measure=measure,
        accuracy=float(correct.double().mean()),
        predicted=predicted,
    )


def scores_of_blocks(bundle: Bundle, features: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the IDs [C], the scores [N, C] and the logits [N, C] of blocks of classes."""
    loss = bundle.spec.loss
    at_once = max(1, _BLOCK_BYTES // (4 * len(features)))
    for rows in bundle.blocks(at_once):
        logits = bundle.spec.logits(features, rows)
        yield rows.class_ids, score(loss.score, logits, eps=loss.eps), logits
