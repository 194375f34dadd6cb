"""`kway plan`: estimates a recipe's memory, traffic and step time without access to the cluster."""

from pathlib import Path
from typing import Annotated

from launch.options import AllowImport, Given, build, options_of, with_options
from launch.plan.request import PlanRequest
from launch.shipped import OVERRIDES, RECIPE
from launch.terminal import wide_console


def plan(
    given: Given,
    recipe: Annotated[Path, RECIPE],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    allow_import: AllowImport = None,
) -> None:
    """Estimate the memory per GPU, network traffic and step time of a recipe on a cluster."""
    request = build(PlanRequest, given)
    from trainer.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or [], allow_imports=allow_import or ())
    from launch.plan.cluster import machine_named
    from launch.plan.plan import Plan, changes
    from launch.plan.table import show

    gpu, link_gbps = request.gpu, request.link_gbps
    machine = machine_named(gpu, link_gbps=link_gbps, ranks_per_node=request.gpus)
    made = Plan(resolved, machine, request)
    show(made, [] if made.memory.fits else changes(made), wide_console(100))


command = with_options(plan, options_of(PlanRequest))
