"""`kway train`: the ranks of `python -m trainer` on this machine, and their exit code."""

from pathlib import Path
from typing import Annotated

import typer

from trainer.recipe import dump_recipe, load_recipe


def train(
    recipe: Annotated[Path, typer.Argument(help="YAML file")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="such as optimizer.lr=0.4")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="processes; default: one a GPU, or one")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the resolved recipe and stop")
    ] = False,
) -> None:
    """Train a recipe, from its newest checkpoint if there is one."""
    resolved = load_recipe(recipe, overrides or [])
    if print_config:
        print(dump_recipe(resolved), end="")
        return
    from launch.elastic import run_ranks

    arguments = [str(recipe), *(overrides or [])]
    code = run_ranks("trainer", arguments, num_processes=nproc or _num_devices())
    raise typer.Exit(code)


def _num_devices() -> int:
    import torch

    return max(1, torch.cuda.device_count())
