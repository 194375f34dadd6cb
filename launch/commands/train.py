"""`kway train`: runs `python -m trainer` as this machine's ranks and exits with their code."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from data.processes import handled_signals
from launch.options import AllowImport
from launch.ranks.placement import LAST_PORT, SHUTDOWN_SECONDS, Placement, parse_conf, parse_nodes
from launch.shipped import RECIPE, shipped_recipes
from launch.terminal import wide_console
from trainer.process.exit_codes import BAD_INPUT, FAILED, INTERRUPTED, PREEMPTED
from trainer.process.signals import STOP_SIGNALS

_MACHINES = "Several machines (as in torchrun)"


def train(
    context: typer.Context,
    recipe: Annotated[Path | None, RECIPE] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="recipe overrides, such as optimizer.lr=0.4"),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, help="number of processes per machine; default: one per GPU, or one without GPUs"
        ),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="maximum number of restarts after a retryable failure")
    ] = 0,
    shutdown_timeout: Annotated[
        int,
        typer.Option(min=0, help="time in seconds for the ranks to save after a stop signal"),
    ] = SHUTDOWN_SECONDS,
    nnodes: Annotated[
        str,
        typer.Option(metavar="N|MIN:MAX", help="number of machines", rich_help_panel=_MACHINES),
    ] = "1",
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="address of the rendezvous", rich_help_panel=_MACHINES
        ),
    ] = None,
    rdzv_id: Annotated[
        str | None,
        typer.Option(help="name of the run in the rendezvous", rich_help_panel=_MACHINES),
    ] = None,
    rdzv_conf: Annotated[
        str,
        typer.Option(
            metavar="KEY=VALUE,…",
            help="is_host=0|1, join_timeout=S, last_call_timeout=S, …",
            rich_help_panel=_MACHINES,
        ),
    ] = "",
    local_addr: Annotated[
        str | None, typer.Option(help="address of this machine", rich_help_panel=_MACHINES)
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            min=0, help="rank of this machine (used with --master-addr)", rich_help_panel=_MACHINES
        ),
    ] = None,
    master_addr: Annotated[
        str | None,
        typer.Option(
            help="host of a static rendezvous, which does not support restarts",
            rich_help_panel=_MACHINES,
        ),
    ] = None,
    master_port: Annotated[
        int, typer.Option(help="port of --master-addr", rich_help_panel=_MACHINES)
    ] = 29500,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the resolved recipe and exit")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="start the ranks and exit before the first step; write nothing"
        ),
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
        _show_recipes(context)
        raise typer.Exit(BAD_INPUT)
    with _nothing_to_save():  # the imports below include torch and take seconds
        from launch.recipe_inputs import check_inputs
        from trainer.recipe import dump_recipe, load_recipe

        resolved = load_recipe(recipe, overrides or [], allow_imports=allow_import or ())
        if print_config:
            print(dump_recipe(resolved), end="")
            return
        least, most = parse_nodes(nnodes)
        placement = Placement(
            num_processes=nproc or _num_devices(),
            min_nodes=least,
            max_nodes=most,
            rdzv_endpoint=rdzv_endpoint,
            rdzv_id=rdzv_id,
            rdzv_conf=parse_conf(rdzv_conf),
            local_addr=local_addr,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=master_port,
            max_restarts=max_restarts,
            shutdown_seconds=shutdown_timeout,
        )
        _check_ports(resolved.telemetry.port, placement.num_processes)
        check_inputs(resolved, recipe)  # here: the ranks of a large run take a minute to fail
        from launch.ranks.run import run_ranks

        options = [*placement.trainer_options, *(["--dry-run"] if dry_run else [])]
        options += [f"--allow-import={path}" for path in allow_import or ()]
        arguments = [*options, "--", str(recipe), *(overrides or [])]
        code = run_ranks("trainer", arguments, placement)
        if code in (FAILED, PREEMPTED, INTERRUPTED):
            # Skip Python's shutdown. During shutdown, another Ctrl-C would print a traceback, and a
            # thread still blocked in torch's store would abort the process when its call returns.
            os._exit(code)
    raise typer.Exit(code)


def _show_recipes(context: typer.Context) -> None:
    from rich.table import Table

    table = Table("shipped recipe", "description")
    for name, description in shipped_recipes().items():
        table.add_row(name, description)
    print(f"{context.get_usage()}\n")
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


def _check_ports(first: int | None, num_processes: int) -> None:
    """Raise ValueError if the ranks' metrics would need ports above the last port."""
    if first and first + num_processes - 1 > LAST_PORT:
        raise ValueError(
            f"telemetry.port is {first}, but the {num_processes} ranks need one port each, and the "
            f"last port is {LAST_PORT}: choose a lower port"
        )


def _num_devices() -> int:
    import torch

    return max(1, torch.cuda.device_count())
