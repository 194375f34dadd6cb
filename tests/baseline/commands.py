"""Runs `kway` in this process, which saves the seconds that its imports take."""

import contextlib
import io
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Ran:
    code: int
    output: str
    errors: str


def kway(*arguments: object) -> Ran:
    """Run a command and return its exit code and what it printed."""
    from launch.main import main

    output, errors, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["kway", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            main()
    except SystemExit as exited:
        code = exited.code if isinstance(exited.code, int) else int(exited.code is not None)
    finally:
        sys.argv = argv
    return Ran(code, output.getvalue(), errors.getvalue())


def must(*arguments: object) -> str:
    """Run a command that must succeed, and return its output."""
    ran = kway(*arguments)
    if ran.code:
        raise RuntimeError(
            f"kway {' '.join(map(str, arguments))} exited with {ran.code}: {ran.errors}"
        )
    return ran.output
