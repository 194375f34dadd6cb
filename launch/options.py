"""Options that commands share, and options derived from the fields of a pydantic class.

An option takes its name, default, bounds and help text from the field, so that each is declared
only once. pydantic parses and checks the text on the command line. `data/option.py` defines markers
for fields whose options differ:

    class Limits(BaseModel):
        request_timeout_seconds: Annotated[float, Option("--timeout")] = Field(30, gt=0, le=3600)
        max_body_bytes: Annotated[int, Option("--max-body-mib", unit=2**20)] = Field(2**25, gt=0)
        replica_id: Annotated[str, Supplied()] = ""

    def serve(given: Given, bundle: Path) -> None:
        limits = build(Limits, given, replica_id="a")

    app.command()(with_options(serve, options_of(Limits)))
"""

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import update_wrapper
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from data.option import NOT_A_FLAG, Argument, Option, Supplied

T = TypeVar("T")
Given = dict[str, Any]
"""Field name -> value, for the fields whose options were passed on the command line."""

AllowImport = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-import",
        metavar="MODULE:CLASS",
        help="custom class that the run or bundle may import; can be repeated",
    ),
]


RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="HOST:PORT of a Ray cluster, or auto; default: this machine",
    ),
]


def options_of(model: type, *, marked_only: bool = False) -> dict[str, "FieldOption"]:
    """Map the names of all fields that are not marked `Supplied` to options, in field order.

    marked_only: return only fields that are marked as `Option` or `Argument`.
    """
    options = {}
    fields: dict[str, FieldInfo] = model.__pydantic_fields__  # type: ignore[attr-defined]
    for name, field in fields.items():
        marks = (item for item in field.metadata if isinstance(item, Option | Supplied))
        marker = next(marks, None)
        if not (isinstance(marker, Supplied) or (marked_only and marker is None)):
            options[name] = FieldOption(name, field, marker or Option())
    return options


def with_options(
    command: Callable[..., Any], options: Mapping[str, "FieldOption"]
) -> Callable[..., Any]:
    """Return a function for typer that has `options` in place of `command`'s first parameter.

    `command` receives the values of the options as a `Given` in that parameter.
    """
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [
        inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        *(option.parameter for option in options.values()),
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own),
    ]

    def run(context: typer.Context, **values: Any) -> Any:
        given = {}
        for name, option in options.items():
            value, source = values.pop(name), context.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                given[name] = option.value(value)
        return command(given, **values)

    update_wrapper(run, command)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def build(model: type[T], given: Mapping[str, Any], **supplied: Any) -> T:
    """Construct `model`. An invalid value raises a one-line ValueError that names the option."""
    try:
        return model(**given, **supplied)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = options_of(model).get(str(first["loc"][0])) if first["loc"] else None
        raised = first.get("ctx", {}).get("error")
        message = str(raised) if isinstance(raised, Exception) else first["msg"]
        if where is None:
            raise ValueError(message) from error
        if first["type"] in ("string_pattern_mismatch", "too_short"):
            # "memory of a pod, such as 6Gi; default: 4Gi"
            message = f"pass the {where.field.description or ''}".partition(";")[0]
        found = where.shown(first["input"])
        found = "nothing" if found == "" else found
        raise ValueError(f"Invalid value for '{where.names}': {message}, got {found}") from error


def number_range(option: str, text: str) -> tuple[int, int]:
    """Parse the value N or MIN:MAX, at most 9,999, of an option: `2` -> (2, 2), `1:4` -> (1, 4)."""
    found = re.fullmatch(r"([1-9]\d{0,3})(?::([1-9]\d{0,3}))?", text)
    least, most = (0, 0) if found is None else (int(found[1]), int(found[2] or found[1]))
    if not 1 <= least <= most:
        raise ValueError(f"{option} is {text}: pass a number such as 2, or a range such as 1:4")
    return least, most


@dataclass(frozen=True)
class FieldOption:
    """The command-line option, or positional argument, of the field `name`."""

    name: str
    field: FieldInfo
    marker: Option

    @property
    def names(self) -> str:
        """The name on the command line, such as `--timeout`."""
        if isinstance(self.marker, Argument):
            return self.marker.metavar or self.name.upper()
        return self.marker.name or f"--{self.name.replace('_', '-')}"

    @property
    def parameter(self) -> inspect.Parameter:
        """The parameter from which typer creates the option. Except for flags, it is a text."""
        default: Any = inspect.Parameter.empty
        if not self.field.is_required():
            default = self.shown(self.field.get_default(call_default_factory=True))
        is_repeated = self._kind in (dict, tuple)
        kind: Any = list[str] if is_repeated else str
        if self._kind is bool:
            kind, default = bool, False if self._is_flag else default
        if kind is not bool and default is not inspect.Parameter.empty:
            default = None if default in (None, "", {}) else str(default)
            default = [default] if is_repeated and default is not None else default
        about: dict[str, Any] = {"help": self.field.description, "metavar": self._metavar}
        is_argument = isinstance(self.marker, Argument)
        info = typer.Argument(**about) if is_argument else typer.Option(self.names, **about)
        annotation = Annotated[kind | None, info] if default is None else Annotated[kind, info]
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, keyword, default=default, annotation=annotation)

    def value(self, given: Any) -> Any:
        """Convert what typer parsed to a value that pydantic accepts for the field."""
        if self._is_flag:
            return self.marker.flag
        if self._kind is dict:
            return _pairs(self.names, given, self.marker.metavar or "NAME=VALUE")
        if self._kind is tuple and not isinstance(self.marker, Argument):
            parts = [part.strip() for text in given for part in text.split(",")]
            return tuple(part for part in parts if part)
        if self.marker.unit != 1:
            with suppress(ValueError, OverflowError):  # pydantic rejects other texts and inf
                return int(float(given) * self.marker.unit)
        return given

    def shown(self, value: Any) -> Any:
        """Convert a value of the field to its text or, with a unit, number on the command line."""
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        is_scaled = self.marker.unit != 1 and isinstance(value, int | float)
        return value / self.marker.unit if is_scaled else value

    @property
    def _is_flag(self) -> bool:
        return self.marker.flag is not NOT_A_FLAG

    @property
    def _plain(self) -> Any:
        """The type of the field without `| None`."""
        kind = bool if self._is_flag else self.marker.type or self.field.annotation
        if get_origin(kind) not in (Union, UnionType):
            return kind
        return next(part for part in get_args(kind) if part is not NoneType)

    @property
    def _kind(self) -> Any:
        """The type of the field without the types of its items."""
        return get_origin(self._plain) or self._plain

    @property
    def _metavar(self) -> str | None:
        """The placeholder in the help: the choices, or the type with its bounds."""
        if self.marker.metavar or self._kind is bool:
            return self.marker.metavar
        if self._kind is Literal:
            return f"[{'|'.join(get_args(self._plain))}]"
        kind = float if self.marker.unit != 1 else self._kind
        name = {int: "INTEGER", float: "FLOAT", Path: "PATH"}.get(kind, "TEXT")
        bounds = [
            f"{sign}{self.shown(getattr(item, limit))}"
            for item in self.field.metadata
            for limit, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
            if hasattr(item, limit)
        ]
        return None if isinstance(self.marker, Argument) else " ".join([name, *bounds])


def _pairs(option: str, given: list[str], expected: str) -> dict[str, str]:
    """Parse a repeated option `NAME=VALUE`."""
    pairs: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value) or name in pairs:
            raise ValueError(f"{option} {text!r}: pass {expected}, with each name only once")
        pairs[name] = value
    return pairs
