"""Overhead of the trainer and of checkpoints: `python -m benchmarks.trainer [SECTION ...]`."""

from functools import partial

from benchmarks import checkpoints, trainer_step
from benchmarks.report import Sections, command_line, report

SECTIONS: Sections = {
    "step": trainer_step.rows,
    "checkpoint": partial(checkpoints.rows, 1),
    "checkpoint_of_two_ranks": partial(checkpoints.rows, 2),
}


if __name__ == "__main__":
    report(command_line("trainer", __doc__).parse_args(), SECTIONS)
