"""Reports a rank's error in one line and determines its exit code."""

import os
import sys
import time

from data.extras import missing_extra
from data.loading.workers import lost_worker
from trainer.config import Recipe
from trainer.faults import LOST, advice, is_out_of_memory
from trainer.process.exit_codes import BAD_INPUT, FAILED, code_of
from trainer.world import World, is_lost_rank

# The errors that `report_error` can explain.
EXPLAINED = (
    ValueError,
    OSError,
    RuntimeError,
    FloatingPointError,
    MemoryError,
    ModuleNotFoundError,
)
# Bad input is found at the start of a run, when a busy launcher takes seconds to stop a rank.
_RANK_0_HEAD_START_SECONDS = {BAD_INPUT: 10, FAILED: 2}


def report_error(
    error: Exception, recipe: Recipe | None, world: World | None, *, evaluating: bool = False
) -> int | None:
    """Print the error in one line and return the exit code, or None for an unexpected error.

    If `evaluating` is true, the line suggests options of `kway eval` instead of recipe changes.
    """
    if isinstance(error, ModuleNotFoundError):
        missing = missing_extra(error)
        return None if missing is None else print_error(missing, BAD_INPUT)
    if world is None and isinstance(error, ValueError | OSError) and not is_lost_rank(error):
        return print_error(str(error), code_of(error))
    if isinstance(error, RuntimeError) and (reason := lost_worker(error)) is not None:
        return print_error(reason, FAILED)
    if is_lost_rank(error):
        return print_error(LOST, FAILED)
    if recipe is not None and world is not None and is_out_of_memory(error):
        return print_error(advice(error, recipe, world, evaluating=evaluating), FAILED)
    if isinstance(error, FloatingPointError):
        return print_error(str(error), FAILED)
    if isinstance(error, ValueError | OSError):
        return print_error(str(error), code_of(error))
    return None


def print_error(line: str, code: int) -> int:
    """Print one line, with the rank if there are several ranks, and return `code`."""
    size, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")
    prefix = f"rank {rank}: " if size != "1" else ""
    if rank != "0":
        # If rank 0 has the same error, only rank 0 should print it: when rank 0 exits, the launcher
        # stops this rank during the sleep.
        time.sleep(_RANK_0_HEAD_START_SECONDS[code])
    print(f"error: {prefix}{line}", file=sys.stderr, flush=True)
    return code
