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
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="build and check the shards of selected ranks without allocating weights",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print JSON, with bytes and seconds as units")
    ] = False,
    allow_import: AllowImport = None,
) -> None:
    """Estimate the memory per GPU, network traffic and step time of a recipe on a cluster."""
    if link_gbps is not None and not math.isfinite(link_gbps):
        raise ValueError(f"--link-gbps is {link_gbps}: pass a number of Gbit/s, such as 400")
    if host_memory is not None and not math.isfinite(host_memory):
        raise ValueError(f"--host-memory is {host_memory}: pass a number of GiB, such as 2048")
    from trainer.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or [], allow_imports=allow_import or ())
    from launch.plan import advice, table
    from launch.plan import dry_run as shapes
    from launch.plan.cluster import machine_named
    from launch.plan.plan import PlanRequest, make_plan

    machine = machine_named(gpu, link_gbps=link_gbps, ranks_per_node=gpus)
    host_bytes = None if host_memory is None else int(host_memory * 2**30)
    request = PlanRequest(machine, nodes, gpus, classes, samples, host_bytes)
    console = wide_console(100)
    if dry_run:
        ranks = shapes.dry_run(resolved, request)
        print(json.dumps(ranks.to_json(), indent=1)) if as_json else shapes.show(ranks, console)
        return
    made = make_plan(resolved, request)
    changes = [] if made.memory.fits else advice.changes(made, request)
    warnings = advice.warnings(made)
    if as_json:
        print(json.dumps(table.as_json(made, changes, warnings), indent=1))
    else:
        table.show(made, changes, warnings, console)
