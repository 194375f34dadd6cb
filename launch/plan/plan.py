"""Plans a run of a recipe on a cluster by combining the costs of its parts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from data.remote.config import is_url
from data.shards.hierarchy import class_paths
from data.shards.manifest import MANIFEST, Manifest
from data.shards.mixture import load_manifest
from launch.plan.cluster import BYTES_PER_GBIT, Cluster, Machine
from launch.plan.head import Classes, Head
from launch.plan.memory import BackboneShare, CheckpointCost, device_memory, host_memory
from launch.plan.request import PlanRequest
from launch.plan.time import phase_times, step_collectives
from trainer.backbone.trace import BackboneCost, trace_backbone
from trainer.config import DataConfig, Recipe
from trainer.strategies.base import StrategyKind
from trainer.world import group_ranks

_SMALL_LOGITS_MIB = 64
_MAX_NODES = 1024
_MIN_SAVING = 0.1  # smallest saving of a suggested change, as a fraction of the missing memory


class Plan:
    """The cost of one step of `recipe` on the most expensive rank of `cluster`.

    memory: device memory of that rank; host: main memory of a machine. seconds: time of a step;
    sent: bytes that a rank sends in it.

    known: costs of the same backbone for micro-batches of other sizes. With two of them, its memory
    is interpolated instead of traced.

    Raises ValueError, as training would, if the class group or the strategy's shard group does not
    divide the ranks, or if the number of classes is unknown.
    """

    def __init__(
        self,
        recipe: Recipe,
        machine: Machine,
        request: PlanRequest,
        known: list[BackboneCost] | None = None,
    ) -> None:
        self.recipe, self.machine, self.request = recipe, machine, request
        train, ranks = recipe.train, request.nodes * request.gpus
        class_ranks = group_ranks(
            train.class_group, key="train.class_group", size=ranks, local_size=request.gpus
        )
        shard_ranks = train.strategy.shard_ranks(ranks, request.gpus)
        self.cluster = Cluster(machine, request.nodes, request.gpus, class_ranks, shard_ranks)
        manifest = manifest_of_shards(recipe.data)
        in_shards = None if manifest is None else len(manifest.classes)
        num_classes = request.classes or in_shards or recipe.head.num_classes
        if num_classes is None:
            raise ValueError(
                f"{recipe.data.shards} contains no manifest.json, so the number of classes is "
                "unknown: pass --classes"
            )
        is_cuda, share = machine.kind == "cuda", -(-train.global_batch // ranks)
        rows = -(-share // min(train.micro_batches, share))
        self.known = known = [] if known is None else known
        if len(known) > 1:
            self.backbone = known[0].at(rows, known[1])
        elif known and known[0].rows == rows:
            self.backbone = known[0]
        else:
            self.backbone = trace_backbone(recipe, rows=rows, ranks=ranks, cuda=is_cuda)
            known.append(self.backbone)
        paths = None
        if manifest is not None and num_classes == in_shards and recipe.head.needs_hierarchy:
            paths = class_paths(recipe.data.shards, manifest)
        self.classes = Classes.of(recipe, num_classes, class_ranks=class_ranks, paths=paths)
        self.head = Head(recipe, self.backbone, self.classes, self.cluster)
        of_backbone = BackboneShare.of(self.head)
        self.memory = device_memory(self.head, of_backbone)
        self.checkpoint = CheckpointCost.of(self.head, request.storage_gbps * BYTES_PER_GBIT)
        copied = self.checkpoint.of_rank * recipe.checkpoint.in_background
        if is_cuda and copied:  # torch rounds pinned memory up to a power of two
            copied = 1 << (copied - 1).bit_length()
        vectors = Path(recipe.data.shards) / ((manifest and manifest.label_vectors) or "none")
        others = {
            "label vectors": (vectors.stat().st_size if vectors.is_file() else 0,) * 3,
            "checkpoint being written": (0, copied, 0),
        }
        self.host = host_memory(self.head, self.memory, others)
        self.collectives = step_collectives(self.head)
        self.sent = sum(map(self.cluster.sent, self.collectives))
        self.phases = [*phase_times(self.head, of_backbone, self.collectives)]
        self.seconds = sum(phase.seconds for phase in self.phases)

    @property
    def interval(self) -> float | None:
        """The best number of seconds between checkpoints for the failure rate of the request."""
        if self.request.mtbf is None:
            return None
        failures = self.request.nodes / (3600 * self.request.mtbf)
        return self.checkpoint.interval(failures_per_second=failures)


def manifest_of_shards(data: DataConfig) -> Manifest | None:
    """Return the manifest of the shards and their mixture, or None if they are not on this
    machine."""
    if any(is_url(folder) or not (Path(folder) / MANIFEST).is_file() for folder in data.addresses):
        return None
    return load_manifest(data)


def changes(plan: Plan) -> list[tuple[str, Plan]]:
    """Return changes, cheapest first, until the plan fits, each with the plan after it and all
    earlier ones. Changes that save little are omitted."""
    best, found = plan, list[tuple[str, Plan]]()

    def planned(recipe: Recipe, request: PlanRequest) -> Plan:
        train, before = recipe.train, best.recipe.train
        is_same = train.activation_checkpointing == before.activation_checkpointing
        is_same &= train.strategy.weight_precision == before.strategy.weight_precision
        return Plan(recipe, plan.machine, request, best.known if is_same else None)

    for what, section, changed in _candidates(plan):
        if best.memory.fits:
            return found
        part = getattr(best.recipe, section).model_copy(update=changed)
        tried = planned(best.recipe.model_copy(update={section: part}), plan.request)
        missing = best.memory.peak - plan.machine.memory
        if best.memory.peak - tried.memory.peak >= _MIN_SAVING * missing:
            best = tried
            found.append((what, tried))
    nodes = plan.request.nodes
    while not best.memory.fits and nodes < _MAX_NODES:
        nodes *= 2
        best = planned(best.recipe, replace(plan.request, nodes=nodes))
        if best.memory.fits:
            found.append((f"--nodes {nodes}", best))
    return found


def _candidates(plan: Plan) -> Iterator[tuple[str, str, dict[str, object]]]:
    """Yield changes, the section of the recipe that they change, and its new values."""
    recipe, ranks = plan.recipe, plan.cluster.ranks
    train = recipe.train
    strategy: StrategyKind = train.strategy
    if ranks > 1 and train.class_group != "world":
        yield "train.class_group=world", "train", {"class_group": "world"}
    if not train.activation_checkpointing:
        what = "train.activation_checkpointing=true"
        yield what, "train", {"activation_checkpointing": True}
    parts = train.micro_batches
    while (parts := parts * 2) <= -(-train.global_batch // ranks):
        yield f"train.micro_batches={parts}", "train", {"micro_batches": parts}
    while ranks > 1 and (smaller := strategy.smaller()) is not None:
        yield strategy.change_to(smaller), "train", {"strategy": smaller}
        strategy = smaller
    default = plan.machine.processor.default_memory_mib
    if (recipe.head.memory_mib or default) > _SMALL_LOGITS_MIB:
        yield f"head.memory_mib={_SMALL_LOGITS_MIB}", "head", {"memory_mib": _SMALL_LOGITS_MIB}
    if recipe.can_have_bf16_rows:
        yield "head.dtype=bf16", "head", {"dtype": "bf16"}
