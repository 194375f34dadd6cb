"""`torchrun … -m trainer.evaluation RUN`: one rank of an evaluation of a run's checkpoint on a
split, with optional settings. Saves the result.

Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted.
"""

import gc

from data.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent()  # called before slow imports, during which the launcher may be killed
    gc.disable()  # collections would take a fifth of the time of the imports

import argparse
from pathlib import Path

from data.progress import plain_lines
from trainer.evaluation.request import EvaluationRequest, evaluate_run
from trainer.process.errors import EXPLAINED, report_error
from trainer.process.exit_codes import DONE, INTERRUPTED
from trainer.world import leave, open_world


def main(arguments: list[str] | None = None) -> int:
    """Evaluate the run given on the command line and return the exit code."""
    gc.enable()
    options = _parser().parse_args(arguments)
    request = EvaluationRequest(
        options.run,
        options.checkpoint,
        options.split,
        tuple(options.set),
        tuple(options.allow_import),
    )
    recipe = world = None
    try:
        recipe = request.recipe()
        with open_world(recipe.train.device, timeout_seconds=recipe.train.timeout_seconds) as world:
            step = evaluate_run(request, world, progress=plain_lines("evaluating"))
            if world.is_main and options.step_to is not None:
                options.step_to.write_text(str(step), encoding="utf-8")
    except EXPLAINED as error:
        code = report_error(error, recipe, world, evaluating=True)
        if code is None:
            raise
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    return DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.evaluation", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--checkpoint", type=int, metavar="STEP")
    parser.add_argument("--split")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--allow-import", action="append", default=[], metavar="MODULE:CLASS")
    # `kway eval` sets this option to the file to which the evaluated step is written.
    parser.add_argument("--step-to", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    if code := main():
        leave(code)
