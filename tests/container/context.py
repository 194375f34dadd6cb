"""The build context: the files that .dockerignore makes available to COPY."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rule:
    text: str
    pattern: re.Pattern[str]
    includes: bool

    def matches(self, path: str) -> bool:
        """Return whether the rule matches this path or a folder above it."""
        parts = path.split("/")
        return any(self.pattern.fullmatch("/".join(parts[:n])) for n in range(1, len(parts) + 1))


@dataclass(frozen=True)
class Context:
    root: Path
    rules: tuple[Rule, ...]

    def has(self, path: str) -> bool:
        """Return whether the context contains a relative path. The last matching rule wins."""
        matching = [rule.includes for rule in self.rules if rule.matches(path)]
        return not matching or matching[-1]

    def files(self, source: str) -> list[Path]:
        """Return the files of `COPY source`, relative to the root.

        Raises FileNotFoundError if there are none.
        """
        start = self.root / source
        found = [Path(source)] if start.is_file() else self._below(start)
        included = sorted(path for path in found if self.has(path.as_posix()))
        if not included:
            raise FileNotFoundError(f"COPY {source}: not in the context, see .dockerignore")
        return included

    def _below(self, start: Path) -> Iterator[Path]:
        for folder, inner, names in os.walk(start):
            relative = Path(folder).relative_to(self.root)
            inner[:] = [name for name in inner if self._may_contain((relative / name).as_posix())]
            yield from (relative / name for name in names)

    def _may_contain(self, folder: str) -> bool:
        """Return whether the context may contain files in a folder. If not, skip it."""
        included = [rule.text for rule in self.rules if rule.includes]
        return self.has(folder) or any(text.startswith((folder + "/", "*")) for text in included)


def read_context(root: Path) -> Context:
    lines = (root / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return Context(root, tuple(_rule(line) for line in rules))


def _rule(line: str) -> Rule:
    text = line.removeprefix("!").strip("/")
    return Rule(text, re.compile(_expression(text)), includes=line.startswith("!"))


def _expression(pattern: str) -> str:
    """Convert a Go filepath.Match pattern, in which ** matches any number of folders, to a
    regex."""
    meanings = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return "".join(meanings.get(part, re.escape(part)) for part in parts)
