"""Prints the bytes per logit that a head moves in a step, with and without tiles, as planned.

    python -m benchmarks.tile_traffic

The head is dense, without bias, with cross-entropy in bf16. With tiles, the bytes of kernels and
products come from the simulation in `launch/plan/tile_traffic.py`. Without tiles, and for all other
operations, each operation moves its operands and results once between cache and memory, because a
block of logits is larger than the cache. Between the SMs and the cache, it moves the same bytes;
products read their operands once per tile of 128 x 128 results.
"""

from benchmarks.gpu.tasks import TEXTS, TaskSize, recipe_of
from launch.plan.cluster import Machine, machine_named
from launch.plan.operations import Operation
from launch.plan.plan import Plan, PlanRequest, make_plan
from launch.plan.tile_traffic import PRODUCT_TILE, KernelOperation

CLASSES, DIM = 1_000_000, 768
GPUS, BATCHES = ("h100", "h200"), (1024, 8192)
_HALF = 2  # bytes


def main() -> None:
    print(
        "| GPU | batch | classes per block | tiles | HBM, bytes per logit | L2, bytes per logit |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for gpu in GPUS:
        machine = machine_named(gpu, link_gbps=None, ranks_per_node=1)
        for batch in BATCHES:
            for tiles in (False, True):
                plan = planned(machine, batch, tiles=tiles)
                hbm, l2 = traffic(plan)
                cells = (gpu.upper(), f"{batch:,}", f"{plan.head.block_classes:,}")
                used = "yes" if tiles else "no"
                print(f"| {' | '.join(cells)} | {used} | {hbm:.1f} | {l2:.0f} |")


def planned(machine: Machine, batch: int, *, tiles: bool) -> Plan:
    """Plan a step whose backbone is as small as possible."""
    encoder = {
        "model_type": "bert",
        "vocab_size": 10,
        "hidden_size": DIM,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 1,
    }
    shape = TaskSize(encoder, classes=CLASSES, batch=batch, tokens=1)
    recipe = recipe_of(TEXTS, shape, {"head": {"bias": False, "tiles": tiles}})
    return make_plan(recipe, PlanRequest(machine, nodes=1, gpus=1, classes=CLASSES))


def traffic(plan: Plan) -> tuple[float, float]:
    """Return the bytes per logit of the phase `head`: those of the memory, and of the cache."""
    operations = plan.operations.phases["head"].items()
    logits = plan.head.group_rows * CLASSES
    hbm = sum(each.bytes * number for each, number in operations)
    l2 = sum(_l2(each) * number for each, number in operations)
    return hbm / logits, l2 / logits


def _l2(operation: Operation) -> int:
    if isinstance(operation, KernelOperation):
        return operation.l2
    if not operation.flops:
        return operation.bytes
    height, width = PRODUCT_TILE
    read = operation.flops * _HALF * (height + width) // (2 * height * width)
    return read + operation.bytes


if __name__ == "__main__":
    main()
