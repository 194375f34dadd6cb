"""Which options a command line gives, for commands whose sources do not all take the same ones."""

from collections.abc import Collection

import typer


def given_options(context: typer.Context) -> frozenset[str]:
    """The options that stand on the command line, such as `--min-count`."""
    return frozenset(
        parameter.opts[0]
        for parameter in context.command.params
        if (source := context.get_parameter_source(parameter.name or ""))
        and source.name == "COMMANDLINE"
    )


def refuse(given: Collection[str], not_taken: Collection[str], why: str) -> None:
    """Raise ValueError with `why` where options are given that are not taken, and name them."""
    if named := sorted(set(given) & set(not_taken)):
        raise ValueError(f"{', '.join(named)}: {why}")
