"""The `kway` command: its sub-commands, and errors as one line with an exit code.

Exit codes: 0 done, 1 failed, 2 bad configuration or input, 130 interrupted.
"""

import sys
from typing import NoReturn

import typer

from launch.commands import (
    demo,
    evaluate,
    export,
    losses,
    query,
    serve,
    shard,
    tokenizer,
    train,
    tree,
)
from launch.wording import printable

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="kway",
    help="Train classifiers with very many classes and serve them one class at a time.",
    epilog="kway --traceback COMMAND … shows where an error came from.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(shard.app, name="shard")
app.add_typer(tree.app, name="tree")
app.command("tokenizer")(tokenizer.tokenizer)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("export")(export.export)
app.command("serve")(serve.serve)
app.command("query")(query.query)
app.command("losses")(losses.losses)
app.command("demo")(demo.demo)


def main() -> None:
    """Run `kway`; a wrong option, ValueError and OSError become one line and exit code 2.

    `kway --traceback COMMAND …` shows where such an error came from.
    """
    show_origin = sys.argv[1:2] == ["--traceback"]
    if show_origin:
        del sys.argv[1]
    try:
        code = app(standalone_mode=False)  # typer's own way with errors is a box of five lines
    except typer.Abort:
        sys.exit(EXIT_FAILED)
    except typer.TyperException as error:
        message = error.format_message()
        if not message:  # no command was given, and typer has printed the help
            sys.exit(EXIT_BAD_INPUT)
        _fail(message)
    except (ValueError, OSError) as error:
        if show_origin:
            raise
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(reason: str) -> NoReturn:
    print(printable(f"error: {' '.join(reason.split())}"), file=sys.stderr)
    sys.exit(EXIT_BAD_INPUT)
