"""From a run to a bundle: the model, its class rows, its thresholds and a model card."""

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from data.config import DataConfig, TextConfig
from data.tokens.tokenizer import Tokenizer, open_tokenizer
from heads import ClassHead
from trainer.bundle import write_bundle
from trainer.bundle_spec import (
    BundleSpec,
    ClassEntry,
    LossSpec,
    RecallThresholds,
    TextSpec,
    Thresholds,
)
from trainer.evaluation import Evaluation, load_evaluation
from trainer.trained import TrainedRun, open_trained
from trainer.world import World

_ROWS_AT_ONCE = 65_536


def export_run(run: Path, out: Path, world: World, *, force: bool = False) -> None:
    """Write the newest model of a run as the bundle `out`; one process.

    Raises what `open_trained` raises, FileNotFoundError where the model was not evaluated yet, and
    ValueError where `out` exists and `force` is off.
    """
    assert world.size == 1, "a bundle is written by one process"
    trained = open_trained(run, world)
    evaluation = load_evaluation(trained.folder.evaluations, step=trained.step)
    write_bundle(
        out,
        backbone=trained.task.backbone,
        spec=_spec(trained, evaluation),
        weight_blocks=_rows_in_class_order(trained.task.head),
        model_card=_model_card(trained, evaluation),
        tokenizer=_tokenizer(trained.recipe.data.text),
        force=force,
    )


def _spec(trained: TrainedRun, evaluation: Evaluation) -> BundleSpec:
    head, data = trained.task.head, trained.recipe.data
    return BundleSpec(
        pooling=trained.recipe.backbone.pooling,
        image=data.image if data.text is None else None,
        text=None if data.text is None else TextSpec(max_length=data.text.max_length),
        classes=tuple(
            ClassEntry(name=info.name, attributes=info.attributes)
            for info in trained.manifest.classes
        ),
        loss=LossSpec(
            kind=head.loss.kind,
            aligned=head.loss.aligned,
            score=head.loss.score_kind,
            eps=head.loss.score_eps,
        ),
        bias=head.bias,
        dim=head.dim,
        thresholds=_thresholds(evaluation),
    )


def _tokenizer(text: TextConfig | None) -> Tokenizer | None:
    if text is None:
        return None
    return open_tokenizer(text.tokenizer, max_length=text.max_length)


def _thresholds(evaluation: Evaluation) -> Thresholds:
    classes = evaluation.classes
    return Thresholds(
        positives=tuple(classes.positives.tolist()),
        recalls=tuple(
            RecallThresholds(
                recall=recall,
                pooled=float(evaluation.pooled[column]),
                per_class=tuple(
                    None if math.isnan(value) else value
                    for value in classes.threshold[:, column].tolist()
                ),
            )
            for column, recall in enumerate(classes.recalls)
        ),
    )


def _rows_in_class_order(head: ClassHead) -> Iterator[Tensor]:
    blocks = head.class_rows(_ROWS_AT_ONCE)
    if head.tree.num_nodes == head.num_classes and not head.tree.has_children.any():
        yield from (block.rows for block in blocks)
        return
    # A tree's blocks come in the order of its nodes.
    rows = torch.empty(head.num_classes, head.dim + head.bias)
    for block in blocks:
        rows[block.class_ids] = block.rows.cpu()
    yield from rows.split(_ROWS_AT_ONCE)


def _model_card(trained: TrainedRun, evaluation: Evaluation) -> str:
    recipe, head = trained.recipe, trained.task.head
    measures = "\n".join(f"| {name} | {value:.4f} |" for name, value in evaluation.metrics.items())
    alignment = (
        "aligned with the Principle of Logit Separation: one logit alone is comparable over inputs"
        if head.loss.aligned
        else "NOT aligned with the Principle of Logit Separation: one logit alone may mislead; "
        "prefer a model trained with `batch_ce` or `bce` for one-class questions"
    )
    asked = "PICTURE" if recipe.data.text is None else '--text "TEXT"'
    without = int((evaluation.classes.positives == 0).sum())
    return f"""# {recipe.run.name}

A classifier of {head.num_classes} classes, exported by kway on {datetime.now(UTC):%Y-%m-%d} at step
{trained.step} of run `{recipe.run}`.

| | |
|---|---|
| backbone | {recipe.backbone.name or (recipe.backbone.config or {}).get("model_type")} |
| head | {recipe.head.weights.kind} weights x {head.loss.kind}, {head.dim} features |
| loss | {alignment} |
| data | {trained.manifest.source} |
| reads | {_reads(recipe.data)} |

## Measured on split `{recipe.data.eval_split}` ({evaluation.num_samples} samples)

| measure | value |
|---|---|
{measures}

The measures named auprc and precision are means over classes of how well a class's logit alone
tells its samples from all others. The thresholds in `bundle.json` were chosen on this same split:
expect somewhat less on new data. {without} classes had no sample in it and use the pooled
threshold.

## Use

    kway query BUNDLE --class "{trained.manifest.classes[0].name}" {asked}
    kway serve BUNDLE
"""


def _reads(data: DataConfig) -> str:
    if data.text is not None:
        return f"texts, cut at {data.text.max_length} tokens of `tokenizer/`"
    image = data.image
    crops = f", the mean of {image.crops} crops" if image.crops > 1 else ""
    return f"pictures, {image.size} x {image.size} x {image.channels}{crops}"
