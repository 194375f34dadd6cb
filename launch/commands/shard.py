"""`kway shard`: sources -> webdataset shards with index and manifest; and a look at them.

Each source of `data.sources.SOURCES` is a command of its own, which `shard_source.py` derives.
"""

from typing import Any

import typer
from typer.core import TyperGroup

from launch.commands import shard_inspect


class _Sources(TyperGroup):
    """Adds the sources as commands where they are asked for, so that `kway --help` loads none."""

    def list_commands(self, context: Any) -> list[str]:
        self._add_sources()
        return super().list_commands(context)

    def get_command(self, context: Any, name: str) -> Any:
        if name not in self.commands:
            self._add_sources()
        return super().get_command(context, name)

    def _add_sources(self) -> None:
        from launch.commands.shard_source import source_commands

        self.commands = {**source_commands(), **self.commands}


app = typer.Typer(
    cls=_Sources, help="Turn a source into shards, or look at shards.", no_args_is_help=True
)

app.command()(shard_inspect.check)
app.command()(shard_inspect.verify)
app.command()(shard_inspect.show)
app.command()(shard_inspect.index)
