"""Parses a Dockerfile. Rejects instructions that this project's Dockerfile does not use."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

_NAMES = (
    *("FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "USER"),
    *("ENTRYPOINT", "CMD", "HEALTHCHECK", "EXPOSE"),
)
_VARIABLE = re.compile(r"\$(?:(?P<plain>\w+)|\{(?P<braced>\w+)(?::-(?P<default>[^}]*))?\})")


@dataclass(frozen=True)
class Instruction:
    line: int
    name: str
    flags: Mapping[str, str]
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)

    @property
    def command(self) -> list[str]:
        """The command to run: the words of the JSON form, or a shell that runs the text."""
        if self.text.startswith("["):
            return cast("list[str]", json.loads(self.text))
        return ["/bin/sh", "-c", self.text]

    @property
    def settings(self) -> dict[str, str]:
        """The `KEY=VALUE` pairs of an ENV or ARG. Keys without a value are omitted."""
        return dict(cast("tuple[str, str]", w.split("=", 1)) for w in self.words if "=" in w)


@dataclass(frozen=True)
class Stage:
    name: str
    base: str
    instructions: tuple[Instruction, ...]

    def copied_stages(self) -> list[str]:
        return [step.flags["from"] for step in self.instructions if "from" in step.flags]


@dataclass(frozen=True)
class Dockerfile:
    """The stages of a Dockerfile, and its global arguments with the build arguments applied."""

    arguments: Mapping[str, str]
    stages: Mapping[str, Stage]

    def stages_for(self, target: str) -> list[str]:
        """Return `target` and the stages that it depends on, in build order."""
        stage = self.stages[target]
        earlier = [name for name in (stage.base, *stage.copied_stages()) if name in self.stages]
        order = [name for each in earlier for name in self.stages_for(each)]
        return list(dict.fromkeys([*order, target]))


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Expand $NAME, ${NAME} and ${NAME:-default}. Unknown variables are empty."""

    def value(found: re.Match[str]) -> str:
        name = found["plain"] or found["braced"]
        return variables.get(name) or found["default"] or ""

    return _VARIABLE.sub(value, text)


def read_dockerfile(text: str, build_arguments: Mapping[str, str]) -> Dockerfile:
    """Parse a Dockerfile with these build arguments.

    Raises ValueError for an unsupported instruction or an undeclared build argument.
    """
    steps = [_instruction(number, line) for number, line in _joined(text)]
    declared = {step.words[0].split("=")[0] for step in steps if step.name == "ARG"}
    if unknown := sorted(build_arguments.keys() - declared):
        raise ValueError(f"--build-arg {unknown[0]}: the Dockerfile declares {sorted(declared)}")
    first = next(index for index, step in enumerate(steps) if step.name == "FROM")
    arguments: dict[str, str] = {}
    for step in steps[:first]:
        for name, default in step.settings.items():
            arguments[name] = build_arguments.get(name, expand(default, arguments))
    stages: dict[str, Stage] = {}
    for index, step in enumerate(steps):
        if step.name == "FROM":
            stage = _stage(step, steps[index + 1 :], arguments)
            stages[stage.name] = stage
    return Dockerfile({**arguments, **build_arguments}, stages)


def _stage(start: Instruction, rest: list[Instruction], arguments: Mapping[str, str]) -> Stage:
    base, word, name = start.words
    if word.upper() != "AS":
        raise ValueError(f"line {start.line}: FROM {start.text}: name the stage with AS")
    end = next((index for index, step in enumerate(rest) if step.name == "FROM"), len(rest))
    return Stage(name, expand(base, arguments), tuple(rest[:end]))


def _instruction(number: int, line: str) -> Instruction:
    name, _, text = line.partition(" ")
    if name not in _NAMES:
        raise ValueError(f"line {number}: {name} is not supported: use {', '.join(_NAMES)}")
    flags, text = {}, text.strip()
    while flag := re.match(r"--([a-z-]+)=(\S+)\s+", text):
        flags[flag[1]] = flag[2]
        text = text[flag.end() :]
    return Instruction(number, name, flags, text)


def _joined(text: str) -> list[tuple[int, str]]:
    """Return the line number and text of each instruction, with continued lines joined."""
    found: list[tuple[int, str]] = []
    continued = False
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if continued:
            found[-1] = (found[-1][0], found[-1][1] + line)
        else:
            found.append((number, line))
        if continued := line.endswith("\\"):
            found[-1] = (found[-1][0], found[-1][1][:-1])
    return found
