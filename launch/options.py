"""Options that commands share, and options derived from the fields of a pydantic class.

An option takes its name, type, default, bounds and help text from the field, so that each is
declared only once. `data/option.py` defines markers for fields whose options differ:

    class Limits(BaseModel):
        request_timeout_seconds: Annotated[float, Option("--timeout")] = Field(30, gt=0, le=3600)
        max_body_bytes: Annotated[int, Option("--max-body-mib", unit=2**20)] = Field(2**25, gt=0)
        replica_id: Annotated[str, Supplied()] = ""

    def serve(given: Given, bundle: Path) -> None:
        limits = build(Limits, given, replica_id="a")

    app.command()(with_options(serve, options_of(Limits)))
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import update_wrapper
from types import GenericAlias, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from annotated_types import Ge, Gt, Le
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from data.input_path import Input
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
        marker = _marker(field)
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
        read = {name: values.pop(name) for name in options}
        given = {
            name: options[name].value(value)
            for name, value in read.items()
            if _is_given(context, name)
        }
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
        if first["type"] == "string_pattern_mismatch":
            # "memory of a pod, such as 6Gi; default: 4Gi"
            message = f"pass the {where.field.description or ''}".partition(";")[0]
        raise ValueError(
            f"Invalid value for '{where.names}': {message}, got {where.shown(first['input'])}"
        ) from error


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
        """The parameter from which typer creates the option."""
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=self._default,
            annotation=Annotated[self._type, self._info],
        )

    def value(self, given: Any) -> Any:
        """Convert what typer parsed to the value of the field."""
        if self._is_flag:
            return self.marker.flag
        if self.marker.type is not None or (isinstance(given, list) and self._holds(tuple)):
            return given
        if self._holds(tuple):
            return tuple(part.strip() for part in given.split(",") if part.strip())
        if self._holds(dict):
            return _pairs(self.names, given, self.marker.metavar or "NAME=VALUE")
        scaled = given if self.marker.unit == 1 else given * self.marker.unit
        return int(scaled) if self._plain is int else scaled

    def shown(self, value: Any) -> Any:
        """Convert a value of the field to the unit used on the command line."""
        is_scaled = self.marker.unit != 1 and isinstance(value, int | float)
        return value / self.marker.unit if is_scaled else value

    @property
    def _info(self) -> Any:
        """typer's metadata for the option: help, metavar and bounds."""
        about: dict[str, Any] = {"help": self.field.description, "metavar": self.marker.metavar}
        if isinstance(self.marker, Argument):
            return typer.Argument(**about)
        if not self._is_flag:
            number = self._plain if self.marker.unit == 1 else float
            about |= {side: self.shown(bound) for side, bound in _bounds(self.field, number)}
        # The command reports unreadable files itself, with a fix.
        return typer.Option(self.names, readable=False, **about)

    @property
    def _type(self) -> Any:
        """The type of the value on the command line."""
        if self._is_flag:
            return bool
        if self.marker.type is not None:
            return self.marker.type | None
        if self._holds(dict):
            return list[str] | None
        if self._holds(tuple):
            # Inputs are texts, because `Path` would remove a slash from a URL, which the field
            # rejects.
            item = str if self._holds_input else get_args(self._plain)[0]
            items = GenericAlias(list, (item,))
            return items if isinstance(self.marker, Argument) else str | None
        if self._holds_input:
            return str if self.field.is_required() else str | None
        if get_origin(self._plain) is Annotated:  # `build` checks its constraints
            return get_args(self._plain)[0] | None
        return self.field.annotation if self.marker.unit == 1 else float

    @property
    def _default(self) -> Any:
        if self._is_flag:
            return False
        if self.field.is_required():
            return inspect.Parameter.empty
        default = self.field.get_default(call_default_factory=True)
        if self._holds(tuple):
            return ",".join(map(str, default)) or None
        return None if self._holds(dict) else self.shown(default)

    @property
    def _is_flag(self) -> bool:
        return self.marker.flag is not NOT_A_FLAG

    @property
    def _plain(self) -> Any:
        """The type of the field without `| None`."""
        annotation = self.field.annotation
        if get_origin(annotation) not in (Union, UnionType):
            return annotation
        return next(part for part in get_args(annotation) if part is not NoneType)

    @property
    def _holds_input(self) -> bool:
        """Whether the field contains one or several input files or folders."""
        types = (self._plain, *get_args(self._plain))
        return Input in types or get_args(Input)[1] in self.field.metadata

    def _holds(self, container: type) -> bool:
        return get_origin(self._plain) is container


def _marker(field: FieldInfo) -> Option | Supplied | None:
    return next((item for item in field.metadata if isinstance(item, Option | Supplied)), None)


def _bounds(field: FieldInfo, number: type) -> Iterator[tuple[Literal["min", "max"], float]]:
    """Yield the bounds that typer can check. pydantic checks all bounds later."""
    for bound in field.metadata:
        if isinstance(bound, Ge):
            yield "min", bound.ge  # type: ignore[misc]
        elif isinstance(bound, Gt) and number is int:
            yield "min", bound.gt + 1  # type: ignore[operator]
        elif isinstance(bound, Le):
            yield "max", bound.le  # type: ignore[misc]


def _pairs(option: str, given: list[str], expected: str) -> dict[str, str]:
    """Parse a repeated option `NAME=VALUE`."""
    pairs: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value) or name in pairs:
            raise ValueError(f"{option} {text!r}: pass {expected}, with each name only once")
        pairs[name] = value
    return pairs


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
