"""`torchrun … -m trainer RECIPE [key=value …]`: one rank of a training run.

Exit codes: 0 done, 1 failed, 2 bad configuration or input, 75 preempted, 130 interrupted.
"""

from trainer.process.shadowed import check_packages

if __name__ == "__main__":
    check_packages("data", "heads")

import gc

from data.processes import die_with_parent
from trainer.process.standard_output import hide_native_warnings, tolerate_closed_output

if __name__ == "__main__":
    # Do this before the slow imports, so that this rank exits even if the launcher is killed while
    # they run.
    die_with_parent()
    hide_native_warnings()
    # The imports create half a million objects. Collections would take a fifth of their time.
    gc.disable()

import argparse
import os
import sys
import traceback
from pathlib import Path

from trainer.process.errors import EXPLAINED, report_error
from trainer.process.exit_codes import DONE, FAILED, INTERRUPTED
from trainer.process.signals import Preempted
from trainer.recipe import load_recipe
from trainer.world import leave, open_world


def main(arguments: list[str] | None = None) -> int:
    """Train with the recipe given on the command line and return the exit code."""
    options = _parser().parse_intermixed_args(arguments)
    if options.launcher is not None:
        die_with_parent(options.launcher)
    recipe = world = None
    try:
        _check_world_size(options.world_size)
        recipe = load_recipe(options.recipe, options.overrides, allow_imports=options.allow_import)
        # This import is slow. Load the recipe first, so that an invalid recipe is reported
        # immediately.
        from trainer.train import train

        gc.enable()
        with open_world(
            recipe.train.device,
            class_group=recipe.train.class_group,
            timeout_seconds=recipe.train.timeout_seconds,
        ) as world:
            train(recipe, world)
    except Preempted as stopped:
        if os.environ.get("RANK", "0") == "0":
            print(stopped, file=sys.stderr, flush=True)
        return stopped.exit_code
    except EXPLAINED as error:
        code = report_error(error, recipe, world)
        if code is None:
            raise
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    return DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument(
        "--world-size",
        metavar="N|MIN:MAX",
        help="required number of ranks; the run fails if the actual number differs",
    )
    parser.add_argument(
        "--allow-import",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="import path to allow in a RECIPE stored by a run; can be repeated",
    )
    # `kway train` sets this option to the process ID of the launcher.
    parser.add_argument("--launcher", type=int, help=argparse.SUPPRESS)
    return parser


def _check_world_size(required: str | None) -> None:
    """Raise ValueError if the world size is not the requested one.

    A rendezvous can complete with fewer ranks, without an error, if a machine is lost or if clocks
    differ.
    """
    if required is None:
        return
    minimum, _, maximum = required.partition(":")
    if not (minimum.isdecimal() and (maximum or minimum).isdecimal()):
        raise ValueError(f"--world-size is {required}, but it must be a number of ranks or MIN:MAX")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if not int(minimum) <= size <= int(maximum or minimum):
        raise ValueError(
            f"the rendezvous ended with world size {size}, but --world-size is {required}: check "
            "that every machine has started its ranks and that the clocks agree, then start again"
        )


def _exit_code() -> int:
    """Return the exit code of `main`, also after an unexpected error.

    Python would wait for the exchange that runs in the background (`trainer/agreement.py`)
    before it exits, but another rank may never take part in it. `leave` does not wait.
    """
    try:
        return main()
    except Exception:
        traceback.print_exc()
        return FAILED


if __name__ == "__main__":
    tolerate_closed_output()
    if code := _exit_code():
        leave(code)
