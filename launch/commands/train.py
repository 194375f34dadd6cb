"""`kway train`: runs `python -m trainer` as this machine's ranks and exits with their code."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from data.processes import handled_signals
from launch.options import AllowImport, Given, build, number_range, options_of, with_options
from launch.ranks.placement import Placement, contradicting_variables
from launch.shipped import OVERRIDES, RECIPE, shipped_recipes
from launch.terminal import wide_console
from trainer.process.exit_codes import BAD_INPUT, FAILED, INTERRUPTED, PREEMPTED
from trainer.process.signals import STOP_SIGNALS


def train(
    given: Given,
    recipe: Annotated[Path | None, RECIPE] = None,
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    nproc: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto|gpu|cpu",
            help="number of processes per machine, as in torchrun; default: one per GPU, or one "
            "without GPUs",
        ),
    ] = None,
    nnodes: Annotated[str, typer.Option(metavar="N|MIN:MAX", help="number of machines")] = "1",
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the resolved recipe and exit")
    ] = False,
    allow_import: AllowImport = None,
) -> None:
    """Train a recipe's model, or resume its run from the newest checkpoint.

    On SIGTERM, SIGUSR1, SIGHUP or Ctrl-C, the run saves a checkpoint and stops.
    A second Ctrl-C stops it immediately.

    Exit codes: 0 done, 1 failed, 2 bad configuration or input, 75 preempted
    (run the command again), 130 interrupted, 128 + n if signal n killed a rank.
    """
    if recipe is None:
        _show_recipes()
        raise typer.Exit(BAD_INPUT)
    with _nothing_to_save():  # the imports below include torch and take seconds
        from launch.recipe_inputs import check_inputs
        from trainer.recipe import dump_recipe, load_recipe

        resolved = load_recipe(recipe, overrides or [], allow_imports=allow_import or ())
        if print_config:
            print(dump_recipe(resolved), end="")
            return
        least, most = number_range("--nnodes", nnodes)
        placement = build(
            Placement,
            given,
            num_processes=num_processes(nproc),
            min_nodes=least,
            max_nodes=most,
        )
        if contradicting := contradicting_variables(placement, os.environ):
            print(
                f"warning: kway train does not read {', '.join(contradicting)}, which contradicts "
                "its options: pass the value as an option, or unset the variable",
                file=sys.stderr,
            )
        check_inputs(resolved, recipe)  # here: the ranks of a large run take a minute to fail
        from launch.ranks.run import run_ranks

        allowed = [f"--allow-import={path}" for path in allow_import or ()]
        arguments = [*placement.trainer_options, *allowed, "--", str(recipe), *(overrides or [])]
        code = run_ranks("trainer", arguments, placement)
        if code in (FAILED, PREEMPTED, INTERRUPTED):
            # Skip Python's shutdown. During shutdown, another Ctrl-C would print a traceback, and a
            # thread still blocked in torch's store would abort the process when its call returns.
            os._exit(code)
    raise typer.Exit(code)


def _show_recipes() -> None:
    from rich.table import Table

    table = Table("shipped recipe", "description")
    for name, description in shipped_recipes().items():
        table.add_row(name, description)
    print("Usage: kway train [OPTIONS] RECIPE [KEY=VALUE]...\n")
    wide_console(140).print(table)
    print("kway train --help lists the options.")


@contextmanager
def _nothing_to_save() -> Iterator[None]:
    """Until the ranks start, exit at once on a stop signal, with code 75 or, for Ctrl-C, 130."""

    def leave(number: int, _frame: object) -> None:
        os._exit(INTERRUPTED if number == signal.SIGINT else PREEMPTED)

    before = {number: signal.signal(number, leave) for number in handled_signals(STOP_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def num_processes(text: str | None) -> int:
    """Return the number that `--nproc` selects, as `torchrun --nproc-per-node` does, but at least
    one process per GPU or a single one by default."""
    if text is not None and text.isdecimal() and int(text):
        return int(text)
    if text not in (None, "auto", "gpu", "cpu"):
        raise ValueError(f"--nproc is {text}: pass a number of at least 1, auto, gpu or cpu")
    import torch

    num_gpus, num_cpus = torch.cuda.device_count(), os.cpu_count() or 1
    if text == "gpu" and not num_gpus:
        raise ValueError("--nproc is gpu, but torch finds no GPU: run kway doctor, or pass cpu")
    return num_cpus if text == "cpu" else num_gpus or (num_cpus if text == "auto" else 1)


command = with_options(train, options_of(Placement))
