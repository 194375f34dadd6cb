"""`torchrun … -m trainer RECIPE [key=value …]`: one rank of a training run.

Exit codes: 0 done, 1 failed, 2 bad configuration or input, 130 interrupted.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from trainer.recipe import load_recipe

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
_FIRST_WORD_SECONDS = 2


def main(arguments: list[str] | None = None) -> int:
    """Train the recipe that the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer", description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(arguments)
    try:
        recipe = load_recipe(options.recipe, options.overrides)
        # Only now torch and all that is slow to import: a bad recipe answers at once.
        from trainer.train import train
        from trainer.world import open_world

        with open_world(recipe.train.device) as world:
            train(recipe, world)
    except (FloatingPointError, ChildProcessError) as error:
        return _fail(error, EXIT_FAILED)
    except (ValueError, OSError) as error:
        return _fail(error, EXIT_BAD_INPUT)
    except RuntimeError as error:
        from data.loading.reader import LOST_WORKER, is_lost_worker

        if is_lost_worker(error):
            return _fail(RuntimeError(LOST_WORKER), EXIT_FAILED)
        if not _is_lost_peer(error):
            raise
        return _fail(RuntimeError("another rank ended in the middle of a step"), EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _is_lost_peer(error: RuntimeError) -> bool:
    """gloo says so only in words."""
    return "gloo/transport" in str(error) or "Connection closed by peer" in str(error)


def _fail(error: Exception, code: int) -> int:
    """One line for a person, from the rank that knows."""
    size, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")
    who = f"rank {rank}: " if size != "1" else ""
    if rank != "0":
        # What rank 0 found too is said once: its end makes the launcher end this rank meanwhile.
        time.sleep(_FIRST_WORD_SECONDS)
    print(f"error: {who}{error}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    if code := main():
        from trainer.world import leave

        leave(code)
