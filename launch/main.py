"""The `kway` command: its sub-commands, and errors as one line with an exit code.

Exit codes: 0 done, 1 failed, 2 bad configuration or input, 130 interrupted.
"""

import sys

import typer

from launch.commands import demo, evaluate, export, losses, query, serve, shard, train, tree

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
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("export")(export.export)
app.command("serve")(serve.serve)
app.command("query")(query.query)
app.command("losses")(losses.losses)
app.command("demo")(demo.demo)


def main() -> None:
    """Run `kway`; ValueError and OSError become one line and exit code 2.

    `kway --traceback COMMAND …` shows where such an error came from.
    """
    show_origin = sys.argv[1:2] == ["--traceback"]
    if show_origin:
        del sys.argv[1]
    try:
        app()
    except (ValueError, OSError) as error:
        if show_origin:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
