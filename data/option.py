"""Markers for the fields of a pydantic class from which a command takes its options.

The name, type, default, bounds and description of an option are those of the field. A marker in the
field's `Annotated` type adds what these do not say. `launch/options.py` reads them.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

NOT_A_FLAG: Final = object()


@dataclass(frozen=True)
class Option:
    """An option whose name or value differs from the field's.

    name: such as "--timeout" for the field `request_timeout_seconds`, or "--nested/--topmost".
    metavar: what stands for the value in the help. unit: the value of the field for 1 on the
    command line, such as 2**20 for MiB in a field of bytes. flag: the option takes no value and
    sets the field to this one. type: of the value on the command line, where the command itself
    turns it into the value of the field.
    """

    name: str = ""
    _: KW_ONLY
    metavar: str | None = None
    unit: float = 1
    flag: Any = NOT_A_FLAG
    type: Any = None


@dataclass(frozen=True)
class Argument(Option):
    """A positional argument, called by its `metavar` or the name of the field."""


@dataclass(frozen=True)
class Supplied:
    """No option: the command supplies the value."""
