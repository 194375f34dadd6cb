"""Markers for the fields of a pydantic class that define the options of a command.

A field defines the name, type, default, bounds and description of an option. A marker in its
`Annotated` type overrides or adds to them. `launch/options.py` reads the markers.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

NOT_A_FLAG: Final = object()


@dataclass(frozen=True)
class Option:
    """An option whose name or value differs from the field's.

    name: for example "--timeout" for the field `request_timeout_seconds`, or "--nested/--topmost".
    metavar: placeholder for the value in the help. unit: the field's value for 1 on the command
    line, such as 2**20 for MiB in a field of bytes. flag: the option takes no value and sets the
    field to this one. type: type of the value on the command line, if the command itself converts
    it.
    """

    name: str = ""
    _: KW_ONLY
    metavar: str | None = None
    unit: float = 1
    flag: Any = NOT_A_FLAG
    type: Any = None


@dataclass(frozen=True)
class Argument(Option):
    """A positional argument, named by its `metavar` or the field."""


@dataclass(frozen=True)
class Supplied:
    """Not an option: the command supplies the value."""
