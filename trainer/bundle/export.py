"""Exports a run as a bundle: the model, its class rows, its thresholds and a model card."""

from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from heads import ClassHead, ClassRows
from trainer.backbone.onnx_backbone import write_onnx
from trainer.bundle.model_card import model_card, thresholds_section
from trainer.bundle.spec import BundleSpec, LossSpec, TextSpec
from trainer.bundle.threshold_file import ClassThresholds
from trainer.bundle.writing import backbone_spec, write_bundle
from trainer.evaluation import Evaluation, load_evaluation
from trainer.run.trained_run import TrainedRun, open_trained
from trainer.world import World

_ROWS_AT_ONCE = 65_536


def export_run(
    run: Path,
    out: Path,
    world: World,
    *,
    onnx: bool = False,
    force: bool = False,
    allow_imports: Collection[str] = (),
) -> ClassThresholds:
    """Export the newest model of a run as the bundle `out`, in a single process, and return its
    thresholds, which are those of its evaluation.

    If `onnx` is true, the backbone is also written for onnxruntime. Raises the errors of
    `open_trained`, `load_evaluation` and `write_onnx`, and ValueError if `out` exists and `force`
    is false.
    """
    assert world.size == 1, "export runs in a single process"
    trained = open_trained(run, world, allow_imports=allow_imports)
    # Export does not evaluate, because that may require many ranks.
    evaluation = load_evaluation(trained.folder.evaluations, step=trained.step)
    thresholds = ClassThresholds.of_promises(evaluation.promises, evaluation.reached.numpy())
    backbone, data = trained.task.backbone, trained.recipe.data
    spec = _spec(trained, thresholds)
    write_bundle(
        out,
        backbone=backbone,
        spec=spec,
        classes=trained.data.manifest.classes,
        thresholds=thresholds,
        weight_blocks=_rows_in_class_order(trained.task.head),
        model_card=_model_card(trained, evaluation, spec, thresholds),
        tokenizer=trained.data.tokenizer,
        write_onnx=(lambda file: write_onnx(backbone, data.image, file)) if onnx else None,
        force=force,
    )
    return thresholds


def _spec(trained: TrainedRun, thresholds: ClassThresholds) -> BundleSpec:
    head, data = trained.task.head, trained.recipe.data
    return BundleSpec(
        pooling=trained.task.backbone.pooling,
        backbone=backbone_spec(trained.recipe.backbone),
        image=data.image if data.text is None else None,
        text=None if data.text is None else TextSpec(max_length=data.text.max_length),
        num_classes=head.num_classes,
        loss=LossSpec.of(head.loss),
        logits=head.evaluated_map(),
        bias=head.bias is not None,
        dim=head.dim,
        recalls=tuple(thresholds.recalls),
    )


def _rows_in_class_order(head: ClassHead) -> Iterator[Tensor]:
    blocks = head.class_rows(_ROWS_AT_ONCE)
    if head.tree.num_nodes == head.num_classes and not head.tree.has_children.any():
        yield from (_with_bias(block) for block in blocks)
        return
    # The blocks of a tree are in node order, not in class order.
    rows = torch.empty(head.num_classes, head.dim + (head.bias is not None))
    for block in blocks:
        rows[block.class_ids] = _with_bias(block).cpu()
    yield from rows.split(_ROWS_AT_ONCE)


def _with_bias(block: ClassRows) -> Tensor:
    """Return the rows in the format of a bundle: each row ends with the bias of its class."""
    if block.bias is None:
        return block.rows
    return torch.cat([block.rows, block.bias.unsqueeze(1)], dim=1)


def _model_card(
    trained: TrainedRun, evaluation: Evaluation, spec: BundleSpec, thresholds: ClassThresholds
) -> str:
    recipe, head = trained.recipe, trained.recipe.head
    measures = "\n".join(f"| {name} | {value:.4f} |" for name, value in evaluation.metrics.items())
    of_classes = "auprc and precision"
    if trained.data.manifest.label_sets:  # precision_at_1 is a mean over samples
        of_classes = "auprc and precision_at_recall"
    split = f"`{recipe.data.eval_split}` ({evaluation.num_samples} samples)"
    measured = f"""## Measured on split {split}

| metric | value |
|---|---|
{measures}

The {of_classes} metrics measure how well the logit of a class, on its own, separates its
samples from all others; they are means over classes, measured on the split that also sets the
thresholds, so expect slightly lower values on new data.
"""
    return model_card(
        str(recipe.run.name),
        f"exported by kway on {datetime.now(UTC):%Y-%m-%d} from\nstep {trained.step} of run "
        f"`{recipe.run}`.",
        {
            "backbone": recipe.backbone.label,
            "head": f"{head.weights.kind} weights x {head.logits.kind} logits, {spec.dim} features",
            "data": str(trained.data.manifest.source),
        },
        spec,
        trained.data.manifest.classes[0].name,
        (measured, thresholds_section(thresholds)),
    )
