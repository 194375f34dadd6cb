"""The `kway` command, also available as `python -m launch`."""

import atexit
import gc
import os
import sys

from trainer.process.shadowed import check_packages


def main() -> None:
    """Run `kway`, after checking that its packages are not shadowed by others."""
    check_packages("data", "heads", "serving")
    # The imports of a command create half a million objects. With Python's threshold of 700, its
    # collections would take a fifth of their time.
    gc.set_threshold(10_000)
    code: object = None

    def skip_shutdown() -> None:
        # Freeing these objects one by one would take a second, a fifth of the time of `kway plan`.
        if isinstance(code, int):
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
            os._exit(code)

    atexit.register(skip_shutdown)  # handlers that are registered later run before it
    from launch.main import main as kway  # imports the packages checked above

    try:
        kway()
    except SystemExit as stopped:
        code = stopped.code
        raise


if __name__ == "__main__":
    main()
