"""The recipe: all settings of a run, validated before the run starts.

`trainer/recipe.py` loads YAML files and applies overrides.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny, model_validator

from data.base_config import Duration, FrozenConfig, Interval, or_instance
from data.config import DataConfig
from heads.config import HeadConfig
from trainer.backbone.config import BackboneConfig, ImportedBackbone
from trainer.optimizers import SGD, Optimizer
from trainer.schedules import Cosine, Schedule
from trainer.strategies import DDP, StrategyConfig
from trainer.world import RankGroup


class EmaConfig(FrozenConfig):
    """An exponential moving average of all weights, used for evaluation and export."""

    decay: float = Field(0.9999, gt=0, lt=1)
    warmup: bool = Field(
        True,
        description="whether to lower the decay to (1 + step) / (10 + step) in early steps",
    )


class TrainConfig(FrozenConfig):
    duration: Duration = Duration(epochs=1)
    global_batch: int = Field(
        256, gt=0, description="number of samples per optimizer step, over all ranks"
    )
    micro_batches: int = Field(
        1, gt=0, description="number of parts into which each rank's share of the batch is split"
    )
    strategy: StrategyConfig = DDP()
    class_group: RankGroup = Field(
        "world",
        description="number of ranks over which the classes are sharded; the batch is "
        "split across the resulting groups",
    )
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    tf32: bool = Field(
        False,
        description="whether float32 matrix products on CUDA use TF32; convolutions always use it",
    )
    compile: bool = Field(
        False, description="whether to compile each block of the backbone with torch.compile"
    )
    channels_last: bool = Field(
        False,
        description="whether to store images in channels-last memory format, which is "
        "faster on CUDA",
    )
    activation_checkpointing: bool = Field(
        False, description="whether to recompute the activations of each block in the backward pass"
    )
    ema: EmaConfig | None = None
    clip_norm: float | None = Field(None, gt=0, description="maximum global gradient norm")
    max_skipped_steps: int = Field(
        0,
        ge=0,
        description="maximum number of steps skipped because of a non-finite loss or "
        "gradient; the run stops at the next such step",
    )
    synchronous: bool | None = Field(
        None,
        description="whether to wait for the result of each step before launching the next one; "
        "the default is false on GPUs if the optimizer, the strategy and the head support it, and "
        "true otherwise",
    )
    timeout_seconds: float = Field(
        600,
        gt=0,
        le=7 * 86400,
        description="maximum time in seconds that a rank waits for the other ranks before the run "
        "fails",
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @model_validator(mode="after")
    def _check_precision_of_strategy(self) -> "TrainConfig":
        required = self.strategy.weight_precision
        if required is not None and required != self.precision:
            raise ValueError(
                f"train.precision is {self.precision}, but train.strategy {self.strategy.label} "
                f"requires {required}: set train.precision={required} or change the strategy"
            )
        return self


class EvalConfig(FrozenConfig):
    every: Interval | None = Field(
        None,
        description="evaluation interval during training; the final model is always evaluated",
    )
    batch: int = Field(512, gt=0, description="number of samples per rank and forward pass")
    topk: tuple[Annotated[int, Field(gt=0)], ...] = Field(
        (1, 5),
        min_length=1,
        description="k of the top-k accuracies or, with sets of labels, of precision, recall, nDCG "
        "and PSP at k",
    )
    recalls: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field((0.9, 0.99), min_length=1)
    confidence: float = Field(
        0.9,
        gt=0,
        lt=1,
        description="confidence of the guarantees and intervals of the thresholds for `recalls`",
    )
    propensity: tuple[
        Annotated[float, Field(ge=0, le=10)], Annotated[float, Field(gt=0, le=1e6)]
    ] = Field(
        (0.55, 1.5),
        description="A and B of the propensities for PSP (Jain et al. 2016, section 4.2): 0.5 and "
        "0.4 for Wikipedia, 0.6 and 2.6 for Amazon",
    )

    @property
    def measures(self) -> list[str]:
        """The names of the metrics with one label per sample or with sets of labels."""
        both = [self.measures_of(label_sets=label_sets) for label_sets in (False, True)]
        return list(dict.fromkeys([*both[0], *both[1]]))

    def measures_of(self, *, label_sets: bool) -> list[str]:
        """Return the names of the metrics. `sa` is computed only if the shards contain label
        vectors, and `psp` not for streams."""
        slc = ["auprc", *(f"precision_at_recall_{recall:g}" for recall in self.recalls)]
        if not label_sets:
            return [*(f"top{k}" for k in self.topk), "sa", *slc]
        names = ("precision", "recall", "ndcg", "psp")
        return [
            *(f"{name}_at_{k}" for name in names for k in self.topk),
            *slc,
            *(f"{name}_f1_at_recall_{r:g}" for r in self.recalls for name in ("micro", "macro")),
        ]


class BestConfig(FrozenConfig):
    """Also keep the checkpoint with the best evaluation result.

    A checkpoint is then saved after each evaluation. Requires `evaluation.every`.
    """

    measure: str = Field(
        "top1", description="name of a metric; with sets of labels, top1 is precision_at_1"
    )
    mode: Literal["max", "min"] = "max"

    def measure_of(self, evaluation: EvalConfig, *, label_sets: bool) -> str:
        """Return the name of the metric. Raises ValueError if it is not computed for such
        labels."""
        measure = "precision_at_1" if label_sets and self.measure == "top1" else self.measure
        if measure not in (known := evaluation.measures_of(label_sets=label_sets)):
            raise ValueError(
                f"checkpoint.keep_best.measure is {measure}, but this run computes only "
                f"{', '.join(known)}: choose one of these"
            )
        return measure


class CheckpointConfig(FrozenConfig):
    every: Interval = Duration(epochs=1)
    keep_last: int = Field(2, gt=0, description="number of newest checkpoints to keep")
    keep_every: Interval | None = Field(
        None, description="interval at which checkpoints are kept permanently"
    )
    keep_best: BestConfig | None = None
    in_background: bool = Field(
        True, description="whether to write checkpoints while training continues"
    )


class TelemetryConfig(FrozenConfig):
    log_every: int = Field(10, gt=0, description="number of steps between log lines")
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="base port of the Prometheus endpoints, to which the "
        "local rank is added; 0 selects any free port",
    )
    host: str = "127.0.0.1"
    tensorboard: bool = Field(
        False, description="whether to also write TensorBoard events to the run folder"
    )
    sample_ids: bool = Field(
        False, description="whether to write the sample IDs of every step to samples-rank*.jsonl"
    )


class Recipe(FrozenConfig):
    """The settings of a run. `run` is the folder for its logs, checkpoints and resolved recipe."""

    run: Path
    seed: int = Field(0, ge=0, lt=2**63)
    resume: Literal["auto", "never"] = "auto"
    data: DataConfig
    backbone: Annotated[SerializeAsAny[BackboneConfig], or_instance(ImportedBackbone)]
    head: HeadConfig = HeadConfig()
    optimizer: Optimizer = SGD()
    schedule: Schedule = Cosine()
    train: TrainConfig = TrainConfig()
    evaluation: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @property
    def calls_head_once(self) -> bool:
        """Whether a step calls the head once for the whole batch, also with micro-batches.

        Gradients of bf16 rows are bf16, so a sum over micro-batches would be rounded repeatedly.
        """
        fuses = self.optimizer.head.fused_sgd is not None
        return self.head.loss.couples_rows or fuses or self.head.dtype != "fp32"

    @property
    def can_have_bf16_rows(self) -> bool:
        """Whether `head.dtype` is fp32 and could be bf16."""
        head, optimizer = self.head, self.optimizer
        rounds = optimizer.is_elementwise or optimizer.head.fused_sgd is not None
        return head.dtype == "fp32" and head.has_class_rows and rounds

    @model_validator(mode="after")
    def _check_combinations(self) -> "Recipe":
        for conflict in self._conflicts():
            raise ValueError(conflict)
        return self

    def _conflicts(self) -> Iterator[str]:
        """Yield an error for each combination of settings that is not possible."""
        head, optimizer, train, loss = self.head, self.optimizer, self.train, self.head.loss
        best = self.checkpoint.keep_best
        is_factored, fused = head.weights.kind == "factored", optimizer.head.fused_sgd
        if is_factored and not optimizer.trains_factored_head:
            yield (
                "head.weights.kind=factored requires plain SGD: set optimizer.kind=sgd (its "
                "momentum applies only to the backbone)"
            )
        if head.dtype == "fp8" and fused is None:
            yield (
                "head.dtype=fp8 needs optimizer.head.fused_sgd: set it to in_backward or deferred, "
                "or set head.dtype=bf16"
            )
        if head.dtype == "bf16" and fused is None and not optimizer.is_elementwise:
            yield (
                f"optimizer {optimizer.kind} does not support bf16 rows: set head.dtype=fp32 or "
                "optimizer.head.fused_sgd"
            )
        if fused is not None and not head.has_class_rows:
            special = loss.kind if loss.over_nodes else "head.weights.kind=factored"
            yield f"{special} does not support optimizer.head.fused_sgd: remove it"
        if fused is not None and optimizer.head_weight_decay and loss.sampled(1, 1) is not None:
            yield (
                "optimizer.head.fused_sgd updates only the sampled classes, so weight decay would "
                "not apply to the others: set optimizer.head.weight_decay=0"
            )
        if fused == "in_backward" and train.clip_norm is not None:
            yield (
                "optimizer.head.fused_sgd=in_backward updates class rows before the norm of the "
                "gradient is known: remove train.clip_norm, or set "
                "optimizer.head.fused_sgd=deferred"
            )
        if fused == "in_backward" and train.precision == "fp16":
            yield (
                "optimizer.head.fused_sgd=in_backward cannot skip the steps that overflow in fp16: "
                "set train.precision=bf16 or optimizer.head.fused_sgd=deferred"
            )
        if head.dtype == "fp8" and train.ema is not None:
            yield (
                "train.ema is float32 and would need four times the memory of fp8 rows: remove "
                "train.ema, or set head.dtype=bf16"
            )
        if is_factored and train.ema is not None:
            yield (
                "train.ema averages the rows of all classes in every step, but "
                "head.weights.kind=factored does not support that: remove one of the two"
            )
        if best is not None and self.evaluation.every is None:
            yield "checkpoint.keep_best requires evaluations during training: set evaluation.every"
        if best is not None and best.measure not in (known := self.evaluation.measures):
            names = ", ".join(known)
            yield f"checkpoint.keep_best.measure is {best.measure}: choose one of {names}"
        if loss.couples_rows and train.global_batch < 2:
            yield (
                f"train.global_batch is {train.global_batch}, but head.loss {loss.kind} "
                "compares the rows of a batch: set train.global_batch to 2 or more"
            )
        if self.data.augment.mix is not None and not loss.accepts_mixed_labels:
            yield (
                f"data.augment.mix assigns two labels to a row, but head.loss {loss.kind} supports "
                "only one: choose another loss or remove data.augment.mix"
            )
        if self.data.stream is not None:
            unknown = (
                "data.stream provides no class counts: index the tars (kway shard index) or set it "
                "to"
            )
            if head.class_weights == "balanced":
                yield f"head.class_weights is balanced, but {unknown} none"
            if head.logits.prior:
                yield f"head.logits.prior is {head.logits.prior:g}, but {unknown} 0"
            if loss.needs_class_counts:
                yield f"head.loss.noise is frequency, but {unknown} uniform"
        if train.micro_batches > train.global_batch:
            yield (
                f"train.micro_batches is {train.micro_batches}, but it must be at most "
                f"train.global_batch, which is {train.global_batch}"
            )
