"""Command-line options that are derived from the fields of a pydantic class."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from pydantic import BaseModel, Field, model_validator
from pydantic.dataclasses import dataclass
from typer.testing import CliRunner, Result

from data.option import Argument, Option, Supplied
from launch.options import Given, build, options_of, with_options


class Limits(BaseModel):
    port: int = Field(8000, ge=0, le=65535, description="port to listen on")
    request_timeout_seconds: Annotated[float, Option("--timeout")] = Field(30, gt=0, le=3600)
    max_body_bytes: Annotated[int, Option("--max-body-mib", unit=2**20)] = Field(2**25, gt=0)
    token_file: Path | None = None
    galleries: Annotated[dict[str, Path], Option("--gallery", metavar="NAME=FOLDER")] = {}
    device: Literal["cpu", "cuda"] = "cpu"
    verify: bool = False
    languages: tuple[str, ...] = Field(("en", "fr"), min_length=1, description="languages, as de")
    tones: Annotated[bool, Option("--no-tones", flag=False)] = True
    replica: Annotated[str, Supplied()] = ""

    @model_validator(mode="after")
    def _has_a_device(self) -> "Limits":
        if self.verify and self.device == "cuda":
            raise ValueError("--verify runs on the CPU: omit --device cuda")
        return self


def run(*arguments: str) -> tuple[Limits | None, Result]:
    built = []

    def serve(given: Given, out: Path = Path("out")) -> None:
        built.append(build(Limits, given, replica=str(out)))

    app = typer.Typer()
    app.command()(with_options(serve, options_of(Limits)))
    result = CliRunner().invoke(app, arguments)
    return (built[0] if built else None), result


def test_fields_keep_their_defaults_without_options():
    limits, _ = run()
    assert limits == Limits(replica="out")
    assert limits.model_fields_set == {"replica"}


def test_options_set_the_fields():
    limits, _ = run(
        *("--port", "0", "--timeout", "2.5", "--max-body-mib", "0.5", "--token-file", "t"),
        *("--gallery", "a=x/y", "--gallery", "b=z", "--device", "cuda", "--languages", "de, it"),
        *("--languages", "fr", "--no-tones", "--out", "o"),
    )
    assert limits == Limits(
        port=0,
        request_timeout_seconds=2.5,
        max_body_bytes=2**19,
        token_file=Path("t"),
        galleries={"a": Path("x/y"), "b": Path("z")},
        device="cuda",
        languages=("de", "it", "fr"),
        tones=False,
        replica="o",
    )


def test_help_prints_descriptions_bounds_and_defaults_in_option_units():
    _, result = run("--help")
    shown = " ".join(result.output.split())
    for part in ("port to listen on", ">=0 <=65535", "--max-body-mib", "32.0", "NAME=FOLDER"):
        assert part in shown
    assert "--replica" not in shown


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--timeout", "0"), ("--timeout", "greater than 0", "got 0")),
        (("--port", "65536"), ("--port", "less than or equal to 65535", "got 65536")),
        (("--device", "tpu"), ("--device", "'cpu' or 'cuda'", "got tpu")),
        (("--max-body-mib", "inf"), ("--max-body-mib", "got inf")),
        (("--max-body-mib", "-2"), ("--max-body-mib", "greater than 0", "got -2")),
        (("--languages", ""), ("--languages", "pass the languages", "got nothing")),
        (("--gallery", "x"), ("--gallery 'x'", "NAME=FOLDER")),
        (("--verify", "--device", "cuda"), ("--verify runs on the CPU: omit",)),
    ],
)
def test_an_invalid_value_raises_a_one_line_error_with_the_option_and_the_value(
    arguments: tuple[str, ...], parts: tuple[str, ...]
):
    limits, result = run(*arguments)
    assert limits is None
    assert isinstance(result.exception, ValueError)
    line = str(result.exception)
    assert "\n" not in line
    assert all(part in line for part in parts)


@dataclass(frozen=True)
class Files:
    files: Annotated[tuple[Path, ...], Argument(), Field(description="files to read")]
    label: str
    nested: Annotated[bool | None, Option("--nested/--topmost")] = None
    seed: Annotated[int, Supplied()] = 0


def test_a_dataclass_has_arguments_and_required_options():
    built = []
    app = typer.Typer()
    app.command()(with_options(lambda given: built.append(given), options_of(Files)))
    runner = CliRunner()
    assert runner.invoke(app, ["a", "b"]).exit_code == 2
    assert runner.invoke(app, ["--label", "x"]).exit_code == 2
    assert runner.invoke(app, ["a", "b", "--label", "x", "--topmost"]).exit_code == 0
    assert build(Files, built[0]) == Files((Path("a"), Path("b")), "x", nested=False)
