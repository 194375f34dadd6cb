"""Markers for pydantic fields that define the options of a command.

A field defines the name, type, default, bounds and description of an option. A marker in its
`Annotated` type overrides or adds to them. `launch/options.py` reads the markers.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

NOT_A_FLAG: Final = object()


@dataclass(frozen=True)
class Option:
    """An option whose name or value differs from the field's.

    name: the name, such as "--timeout" for the field `request_timeout_seconds`, or
    "--thumbnails/--no-thumbnails". metavar: the placeholder for the value in the help. unit: the
    field value that corresponds to 1 on the command line, such as 2**20 for MiB if the field is in
    bytes. flag: the value to which the option sets the field; such an option does not take a value.
    type: the type of the value on the command line, if the command itself converts it.
    """

    name: str = ""
    _: KW_ONLY
    metavar: str | None = None
    unit: float = 1
    flag: Any = NOT_A_FLAG
    type: Any = None


@dataclass(frozen=True)
class Argument(Option):
    """A positional argument, named after its `metavar` or the field."""


@dataclass(frozen=True)
class Supplied:
    """A field that is not an option, because the command supplies its value."""
