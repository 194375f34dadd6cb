"""Exports a run as a bundle: the model, its class rows, its thresholds and a model card."""

import json
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from data.config import DataConfig, TextConfig
from data.messages import kway_command
from data.text.tokenizer import Tokenizer, open_tokenizer
from heads import ClassHead, ClassRows
from heads.config import HeadConfig
from trainer.backbone.onnx_backbone import write_onnx
from trainer.bundle.model_card import thresholds_section
from trainer.bundle.spec import BundleSpec, ClassEntry, LossSpec, TextSpec
from trainer.bundle.thresholds import ClassThresholds
from trainer.bundle.writing import backbone_spec, write_bundle
from trainer.evaluation import Evaluation, load_evaluation
from trainer.evaluation.run_evaluation import EvaluationRequest
from trainer.run.trained_run import TrainedRun, open_trained
from trainer.world import World

_ROWS_AT_ONCE = 65_536


def export_run(
    run: Path,
    out: Path,
    world: World,
    *,
    recalls: Sequence[float] = (),
    confidence: float | None = None,
    onnx: bool = False,
    force: bool = False,
    allow_imports: Collection[str] = (),
) -> ClassThresholds:
    """Export the newest model of a run as the bundle `out`, in a single process, and return its
    thresholds.

    The bundle contains thresholds for the recipe's `evaluation.recalls` and for `recalls`. Their
    guarantees and intervals have the `confidence`, by default the recipe's `evaluation.confidence`.
    If `onnx` is true, the backbone is also written for onnxruntime.

    Raises the errors of `open_trained` and `write_onnx`; FileNotFoundError, with the command to
    run, if the model was not evaluated at these recalls and this confidence; and ValueError if
    `out` exists and `force` is false.
    """
    assert world.size == 1, "export runs in a single process"
    trained = open_trained(run, world, allow_imports=allow_imports)
    evaluation = _evaluation(run, trained, recalls, confidence, allow_imports)
    thresholds = ClassThresholds.of_promises(
        evaluation.promises, evaluation.reached.numpy(), evaluation.num_samples
    )
    backbone, image = trained.task.backbone, trained.recipe.data.image
    write_bundle(
        out,
        backbone=backbone,
        spec=_spec(trained, thresholds),
        classes=(
            ClassEntry(name=info.name, attributes=info.attributes)
            for info in trained.manifest.classes
        ),
        thresholds=thresholds,
        weight_blocks=_rows_in_class_order(trained.task.head),
        model_card=_model_card(trained, evaluation, thresholds),
        tokenizer=_tokenizer(trained.recipe.data.text),
        write_onnx=(lambda file: write_onnx(backbone, image, file)) if onnx else None,
        force=force,
    )
    return thresholds


def _evaluation(
    run: Path,
    trained: TrainedRun,
    recalls: Sequence[float],
    confidence: float | None,
    allow_imports: Collection[str],
) -> Evaluation:
    """Return the saved evaluation that covers all recalls at this confidence. Export does not
    evaluate, because that may require many ranks.
    """
    own = trained.recipe.evaluation
    wanted = sorted({*own.recalls, *recalls})
    settings = []
    if set(wanted) != set(own.recalls):
        settings.append(f"evaluation.recalls={json.dumps(wanted)}")
    if confidence not in (None, own.confidence):
        settings.append(f"evaluation.confidence={confidence}")
    if not settings:
        return load_evaluation(trained.folder.evaluations, step=trained.step)
    try:
        folder = EvaluationRequest(
            run, settings=tuple(settings), allow_imports=tuple(allow_imports)
        ).folder()
        return load_evaluation(folder, step=trained.step)
    except FileNotFoundError as error:
        allowed = [f"--allow-import={path}" for path in allow_imports]
        command = ["eval", str(run), "--checkpoint", str(trained.step)]
        for setting in settings:
            command += ["--set", setting]
        raise FileNotFoundError(
            f"{run} was not evaluated at these recalls and this confidence: run "
            f"`{kway_command(*command, *allowed)}`, then export again"
        ) from error


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


def _tokenizer(text: TextConfig | None) -> Tokenizer | None:
    if text is None:
        return None
    return open_tokenizer(text.tokenizer, max_length=text.max_length)


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


def _model_card(trained: TrainedRun, evaluation: Evaluation, thresholds: ClassThresholds) -> str:
    recipe, head = trained.recipe, trained.task.head
    measures = "\n".join(f"| {name} | {value:.4f} |" for name, value in evaluation.metrics.items())
    alignment = (
        "aligned with the Principle of Logit Separation: a single logit is comparable across inputs"
        if head.loss.aligned
        else "NOT aligned with the Principle of Logit Separation: a single logit may be "
        "misleading; prefer a model trained with `batch_ce` or `bce` for single-class queries"
    )
    query = "IMAGE" if recipe.data.text is None else '--text "TEXT"'
    return f"""# {recipe.run.name}

A classifier for {head.num_classes} classes, exported by kway on {datetime.now(UTC):%Y-%m-%d} from
step {trained.step} of run `{recipe.run}`.

| | |
|---|---|
| backbone | {recipe.backbone.label} |
| head | {_head_of(recipe.head)}, {head.dim} features |
| loss | {alignment} |
| data | {", ".join(map(str, trained.manifest.sources))} |
| input | {_reads(recipe.data)} |

## Measured on split `{recipe.data.eval_split}` ({evaluation.num_samples} samples)

| metric | value |
|---|---|
{measures}

The auprc and precision metrics measure how well the logit of a class, on its own, separates its
samples from all others; they are means over classes, measured on the split that also sets the
thresholds, so expect slightly lower values on new data.

{thresholds_section(thresholds)}
## Use

    {kway_command("query", "BUNDLE", "--class", trained.manifest.classes[0].name)} {query}
    kway serve BUNDLE
"""


def _head_of(head: HeadConfig) -> str:
    return f"{head.weights.kind} weights x {head.logits.kind} logits x {head.loss.kind}"


def _reads(data: DataConfig) -> str:
    if data.text is not None:
        return f"texts, truncated to {data.text.max_length} tokens of `tokenizer/`"
    image = data.image
    crops = f", the mean of {image.crops} crops" if image.crops > 1 else ""
    return f"images, {image.size} x {image.size} x {image.channels}{crops}"
