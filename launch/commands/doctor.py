"""`kway doctor`: checks whether this machine can run training, and suggests fixes."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data.messages import pluralize, printable
from launch.options import AllowImport
from launch.shipped import OVERRIDES, RECIPE

if TYPE_CHECKING:
    from launch.doctor.checks import Workload

_COLORS = {"ok": "green", "warning": "yellow", "error": "red"}


def doctor(
    recipe: Annotated[Path | None, RECIPE] = None,
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=2, help="ranks on this machine; default: one per GPU, at least 2"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="port of the rendezvous, which must be free"),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT", help="port of another machine to connect to; can be repeated"
        ),
    ] = None,
    allow_import: AllowImport = None,
) -> None:
    """Check whether this machine can run training. Exits with code 1 if training would fail.

    Without a recipe, the run folder is the current directory.
    """
    from launch.doctor.checks import CHECKS

    workload = _workload(recipe, overrides or [], allow_import or [], nproc)
    workload = replace(workload, port=port, peers=tuple(map(_address, peer or ())))
    levels = Counter[str]()
    for topic, check in CHECKS.items():
        found = list(check(workload))
        for finding in found:
            levels[finding.level] += 1
            level = typer.style(finding.level, fg=_COLORS[finding.level])  # only on a terminal
            fix = f"; {finding.fix}" if finding.fix else ""
            typer.echo(f"{level}: {printable(f'{topic}: {finding.found}{fix}')}")
        if topic == "torch" and found[0].level == "error":
            break  # the collectives need torch
    problems = pluralize(levels["error"], "error"), pluralize(levels["warning"], "warning")
    print(", ".join(problems) if levels["error"] or levels["warning"] else "no problems found")
    raise typer.Exit(1 if levels["error"] else 0)


def _workload(
    path: Path | None, overrides: list[str], allow_imports: list[str], nproc: int | None
) -> "Workload":
    from launch.doctor.checks import Workload

    # Count the GPUs without importing torch, because the installation of torch may be broken.
    ranks = nproc or max(2, len(list(Path("/proc/driver/nvidia/gpus").glob("*"))))
    if path is None:
        return Workload(Path(), ranks)
    # Reading a recipe requires torch.
    from trainer.recipe import load_recipe

    recipe = load_recipe(path, overrides, allow_imports=allow_imports)
    data = recipe.data
    if data.text is None:
        sample = data.largest_side**2 * data.image.channels
    else:
        sample = 2 * 8 * data.text.max_length  # ids and mask, int64
    # A loader process keeps four batches in shared memory: two prefetched, one being created and
    # one being copied (`data/loading/workers.py`).
    shared = 4 * data.workers * recipe.train.global_batch * sample
    return Workload(recipe.run, ranks, shared)


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"--peer {text!r} is not HOST:PORT: pass an address such as node2:29400")
    return host.strip("[]"), int(port)
