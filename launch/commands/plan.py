"""`kway plan`: estimates a recipe's memory, traffic and step time without access to the cluster."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from launch.options import AllowImport
from launch.shipped import RECIPE
from launch.terminal import wide_console


def plan(
    recipe: Annotated[Path, RECIPE],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="recipe overrides, such as optimizer.lr=0.4"),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="number of machines")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs per machine, with one rank per GPU")] = 1,
    gpu: Annotated[
        str, typer.Option(help="GPU model: h100, h200, a100, …; cpu: the CPU of this machine")
    ] = "h100",
    classes: Annotated[
        int | None, typer.Option(min=2, help="number of classes; default: taken from the shards")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="samples per epoch; default: taken from the shards")
    ] = None,
    link_gbps: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="bandwidth from a GPU to other machines, in Gbit/s; default: depends on --gpu",
        ),
    ] = None,
    host_memory: Annotated[
        float | None, typer.Option(min=0.001, help="main memory of each machine, in GiB")
    ] = None,
    storage_gbps: Annotated[
        float,
        typer.Option(
            min=0.001, help="bandwidth from a machine to the storage of checkpoints, in Gbit/s"
        ),
    ] = 10.0,
    mtbf: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="mean time between failures of a machine, in hours; the plan then contains the "
            "best interval between checkpoints",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print JSON, with bytes and seconds as units")
    ] = False,
    allow_import: AllowImport = None,
) -> None:
    """Estimate the memory per GPU, network traffic and step time of a recipe on a cluster."""
    numbers = {
        "--link-gbps": link_gbps,
        "--host-memory": host_memory,
        "--storage-gbps": storage_gbps,
        "--mtbf": mtbf,
    }
    for option, number in numbers.items():
        if number is not None and not math.isfinite(number):
            raise ValueError(f"{option} is {number}: pass a number, such as 100")
    from trainer.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or [], allow_imports=allow_import or ())
    from launch.plan import advice, table
    from launch.plan.cluster import BYTES_PER_GBIT, machine_named
    from launch.plan.plan import Plan, PlanRequest

    machine = machine_named(gpu, link_gbps=link_gbps, ranks_per_node=gpus)
    host_bytes = None if host_memory is None else int(host_memory * 2**30)
    storage = storage_gbps * BYTES_PER_GBIT
    request = PlanRequest(machine, nodes, gpus, classes, samples, host_bytes, storage)
    made = Plan(resolved, request)
    changes = [] if made.memory.fits else advice.changes(made, request)
    warnings = advice.warnings(made)
    if as_json:
        tables = table.as_json(made, changes, warnings, mtbf_hours=mtbf)
        print(json.dumps(tables, indent=1))
    else:
        table.show(made, changes, warnings, wide_console(100), mtbf_hours=mtbf)
