"""`kway plan`: memory, traffic and step time of a recipe on a cluster that need not exist."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from launch.options import AllowImport
from launch.terminal import wide_console


def plan(
    recipe: Annotated[Path, typer.Argument(help="YAML file", dir_okay=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="such as optimizer.lr=0.4")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="machines")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="processes a machine, one a GPU")] = 1,
    gpu: Annotated[str, typer.Option(help="h100, h200, a100, … or cpu: this machine's")] = "h100",
    classes: Annotated[
        int | None, typer.Option(min=2, help="instead of the shards' classes")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="of an epoch, instead of the shards'")
    ] = None,
    link_gbps: Annotated[
        float | None, typer.Option(min=0.001, help="a GPU's rate to other machines, Gbit/s")
    ] = None,
    host_memory: Annotated[
        float | None, typer.Option(min=0.001, help="main memory of a machine, GiB")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="build the shapes of the ranks, and check them")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="bytes and seconds, for programs")
    ] = False,
    allow_import: AllowImport = None,
) -> None:
    """Say what a recipe needs on a cluster: memory a GPU, bytes on the wire, time a step."""
    if link_gbps is not None and not math.isfinite(link_gbps):
        raise ValueError(f"--link-gbps is {link_gbps}: give a number of Gbit/s, such as 400")
    if host_memory is not None and not math.isfinite(host_memory):
        raise ValueError(f"--host-memory is {host_memory}: pass a number of GiB, such as 2048")
    from trainer.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or [], allow_imports=allow_import or ())
    from launch.plan import advice, table
    from launch.plan import dry_run as shapes
    from launch.plan.cluster import machine_named
    from launch.plan.plan import PlanRequest, make_plan

    machine = machine_named(gpu, link_gbps=link_gbps, ranks_a_node=gpus)
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
