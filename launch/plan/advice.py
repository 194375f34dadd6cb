"""Suggests changes that make a plan fit, and warns about settings that training would reject."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from heads.tiles.launch import LOWEST_CAPABILITY
from heads.weights import shard_range
from launch.plan.plan import Plan, PlanRequest
from trainer.backbone.trace import BackboneCost
from trainer.config import Recipe
from trainer.strategies.base import StrategyKind

_SMALL_LOGITS_MIB = 64
_MAX_NODES = 1024
_MIN_SAVING = 0.1  # smallest reported saving, as a fraction of the missing memory


@dataclass(frozen=True)
class Change:
    """Overrides (or `--nodes`) to apply on top of all earlier changes, and the resulting peak."""

    what: str
    peak: int
    fits: bool


def changes(plan: Plan, request: PlanRequest) -> list[Change]:
    """Return changes, cheapest first, until the plan fits. Changes that save little are omitted."""
    best = plan
    found: list[Change] = []
    traced: dict[object, list[BackboneCost]] = {_key(plan.recipe): [plan.backbone]}

    def planned(recipe: Recipe, request: PlanRequest) -> Plan:
        known = traced.setdefault(_key(recipe), [])
        made = Plan(recipe, request, known=known)
        if len(known) < 2 and made.backbone not in known:
            known.append(made.backbone)
        return made

    for what, changed in _candidates(plan, request):
        if best.memory.fits:
            return found
        tried = planned(_with(best.recipe, changed), request)
        if best.memory.peak - tried.memory.peak >= _MIN_SAVING * _missing(best):
            best = tried
            found.append(Change(what, tried.memory.peak, bool(tried.memory.fits)))
    nodes = request.nodes
    while not best.memory.fits and nodes < _MAX_NODES:
        nodes *= 2
        best = planned(best.recipe, replace(request, nodes=nodes))
        if best.memory.fits:
            found.append(Change(f"--nodes {nodes}", best.memory.peak, True))
    return found


def _key(recipe: Recipe) -> object:
    """Return the settings on which the activations of a micro-batch depend, except its size."""
    return recipe.train.activation_checkpointing, recipe.train.strategy.weight_precision


def _missing(plan: Plan) -> int:
    assert plan.memory.capacity is not None
    return plan.memory.peak - plan.memory.capacity


def _candidates(plan: Plan, request: PlanRequest) -> Iterator[tuple[str, dict[str, object]]]:
    recipe = plan.recipe
    train, ranks = recipe.train, request.nodes * request.gpus
    if ranks > 1 and train.class_group != "world":
        yield "train.class_group=world", {"class_group": "world"}
    if not train.activation_checkpointing:
        yield "train.activation_checkpointing=true", {"activation_checkpointing": True}
    share, parts = -(-train.global_batch // ranks), train.micro_batches
    while (parts := parts * 2) <= share:
        yield f"train.micro_batches={parts}", {"micro_batches": parts}
    strategy: StrategyKind = train.strategy
    whole = recipe.optimizer.needs_whole_tensors
    while ranks > 1 and (smaller := strategy.smaller(whole_tensors=whole)) is not None:
        yield strategy.change_to(smaller), {"strategy": smaller}
        strategy = smaller
    default = request.machine.processor.default_memory_mib
    if (recipe.head.memory_mib or default) > _SMALL_LOGITS_MIB:
        yield f"head.memory_mib={_SMALL_LOGITS_MIB}", {"memory_mib": _SMALL_LOGITS_MIB}
    if recipe.can_have_bf16_rows:
        yield "head.dtype=bf16", {"dtype": "bf16"}


def _with(recipe: Recipe, changed: dict[str, object]) -> Recipe:
    section = "head" if changed.keys() <= {"memory_mib", "dtype"} else "train"
    part = getattr(recipe, section).model_copy(update=changed)
    return recipe.model_copy(update={section: part})


def warnings(plan: Plan) -> list[str]:
    """Return one line for each setting that training would reject or that is inefficient."""
    recipe, cluster = plan.recipe, plan.cluster
    train, machine, nodes = recipe.train, cluster.machine, plan.classes.nodes
    start, stop = shard_range(nodes, cluster.class_ranks - 1, cluster.class_ranks)
    conditions = {
        f"train.global_batch is {train.global_batch}, less than one sample for each of the "
        f"{cluster.ranks} ranks: raise it, or use fewer GPUs": train.global_batch < cluster.ranks,
        f"the head has {nodes} rows, fewer than one for each of the {cluster.class_ranks} ranks "
        "of a class group: lower train.class_group": start == stop,
        f"{machine.name} does not support {train.precision}: set train.precision to fp16 or fp32": (
            train.precision not in machine.flops
        ),
        f"{machine.name} does not support tiles, which need compute capability 8.0 or later: set "
        "head.tiles=false": recipe.head.tiles and machine.capability < LOWEST_CAPABILITY,
        f"class groups of {cluster.class_ranks} ranks span several nodes of {cluster.gpus} GPUs: "
        "set train.class_group to node or to a divisor of the GPUs per node": (
            cluster.crosses_nodes("class") and train.class_group != "world"
        ),
        "the label tree is not built: the plan assumes the largest possible tree": (
            recipe.head.weights.kind == "vtree" or recipe.head.loss.over_nodes
        ),
    }
    return [line for line, applies in conditions.items() if applies]
