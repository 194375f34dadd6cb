"""The option `--allow-import` of commands that open a run or a bundle."""

from typing import Annotated

import typer

AllowImport = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-import",
        metavar="MODULE:CLASS",
        help="import this component, which a run or bundle names; repeatable",
    ),
]
