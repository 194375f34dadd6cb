"""What .dockerignore lets into a build: the files that COPY may take."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rule:
    text: str
    pattern: re.Pattern[str]
    keeps: bool

    def fits(self, path: str) -> bool:
        """Whether the rule speaks of this path or of a folder above it."""
        parts = path.split("/")
        return any(self.pattern.fullmatch("/".join(parts[:n])) for n in range(1, len(parts) + 1))


@dataclass(frozen=True)
class Context:
    root: Path
    rules: tuple[Rule, ...]

    def has(self, path: str) -> bool:
        """Whether a file of this path, relative to the root, is sent: the last rule decides."""
        fitting = [rule.keeps for rule in self.rules if rule.fits(path)]
        return not fitting or fitting[-1]

    def files(self, source: str) -> list[Path]:
        """The files, relative to the root, that `COPY source` takes; FileNotFoundError if none."""
        start = self.root / source
        found = [Path(source)] if start.is_file() else self._below(start)
        sent = sorted(path for path in found if self.has(path.as_posix()))
        if not sent:
            raise FileNotFoundError(f"COPY {source}: no such file in what .dockerignore lets in")
        return sent

    def _below(self, start: Path) -> Iterator[Path]:
        for folder, inner, names in os.walk(start):
            here = Path(folder).relative_to(self.root)
            inner[:] = [name for name in inner if self._may_hold((here / name).as_posix())]
            yield from (here / name for name in names)

    def _may_hold(self, folder: str) -> bool:
        """Whether something below the folder may be sent: others, such as .venv, are not walked."""
        kept = [rule.text for rule in self.rules if rule.keeps]
        return self.has(folder) or any(text.startswith((folder + "/", "*")) for text in kept)


def read_context(root: Path) -> Context:
    lines = (root / ".dockerignore").read_text(encoding="utf-8").splitlines()
    said = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return Context(root, tuple(_rule(line) for line in said))


def _rule(line: str) -> Rule:
    text = line.removeprefix("!").strip("/")
    return Rule(text, re.compile(_expression(text)), keeps=line.startswith("!"))


def _expression(pattern: str) -> str:
    """Go's filepath.Match, and ** for any number of folders."""
    meanings = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return "".join(meanings.get(part, re.escape(part)) for part in parts)
