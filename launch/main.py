"""The `kway` command: registers the subcommands, and reports errors in one line.

Exit codes: 0 done, 1 failed, 2 bad configuration or input, 75 preempted, 130 interrupted, 128 + n
if signal n killed a rank, or ended this process as PID 1 of a container.
"""

import os
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Annotated, NoReturn

import typer

from data.extras import missing_extra
from data.messages import printable
from launch.commands import (
    calibrate,
    demo,
    doctor,
    evaluate,
    export,
    import_model,
    index,
    k8s,
    losses,
    plan,
    quantize,
    query,
    report,
    serve,
    shard,
    tokenizer,
    train,
    tree,
)
from trainer.process.exit_codes import BAD_INPUT, DONE, FAILED, INTERRUPTED, KILLED, code_of
from trainer.process.standard_output import hide_native_warnings

app = typer.Typer(
    name="kway",
    context_settings={"help_option_names": ["-h", "--help"]},  # inherited by all commands
    epilog="kway --traceback COMMAND … prints the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        try:
            print(f"kway {version('kway')}")
        except PackageNotFoundError:  # a source tree
            print("kway (not installed)")
        raise typer.Exit


@app.callback()
def kway(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="print the version and exit", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Train classifiers with very many classes and serve them one class at a time."""


app.add_typer(shard.app, name="shard")
app.add_typer(tree.app, name="tree")
app.command("tokenizer")(tokenizer.tokenizer)
app.command("train")(train.command)
app.command("eval")(evaluate.evaluate)
app.command("export")(export.export)
app.command("import")(import_model.import_model)
app.command("calibrate")(calibrate.command)
app.command("quantize")(quantize.command)
app.command("index")(index.index)
app.command("serve")(serve.command)
app.command("query")(query.query)
app.command("losses")(losses.losses)
app.command("plan")(plan.command)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)
app.add_typer(k8s.app, name="k8s")
app.command("demo")(demo.demo)


def main() -> None:
    """Run `kway`."""
    run(app)


def run(app: typer.Typer) -> NoReturn:
    """Run a command. Reports invalid options, ValueError and OSError in one line.

    The exit code for such an error is 2, or 1 if the error may be transient (`data/retry.py`). If
    `--traceback` is the first argument, the error is raised with its traceback instead.
    """
    hide_native_warnings()
    _exit_on_sigterm()
    show_origin = sys.argv[1:2] == ["--traceback"]
    if show_origin:
        del sys.argv[1]
    try:
        code = app(standalone_mode=False)  # otherwise typer prints each error as a five-line box
    except typer.Abort:
        sys.exit(FAILED)
    except typer.TyperException as error:
        message = error.format_message()
        if not message:  # called without a command; typer has printed the help
            sys.exit(BAD_INPUT)
        _fail(message)
    except (ValueError, OSError) as error:
        if show_origin:
            raise
        _fail(str(error), code_of(error))
    except ModuleNotFoundError as error:
        reason = missing_extra(error)
        if reason is None or show_origin:
            raise
        _fail(reason)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(code if isinstance(code, int) else DONE)


def _exit_on_sigterm() -> None:
    """Make SIGTERM end this process even if its parent ignored it or this is PID 1 of a container.

    The kernel does not deliver a signal to PID 1 unless there is a handler for it. Commands that
    must save data or finish requests before they exit install their own handler.
    """
    if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    # Exit immediately, like the default action of the signal. An exception would run cleanup code,
    # which might never finish.
    os._exit(KILLED + number)


def _fail(reason: str, code: int = BAD_INPUT) -> NoReturn:
    print(printable(f"error: {' '.join(reason.split())}"), file=sys.stderr)
    sys.exit(code)
