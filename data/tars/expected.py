"""How many samples tars should contain: nothing else detects a valid tar that lacks samples."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.skipped import Skipped

_MAX_BYTES = 1 << 28


@dataclass(frozen=True)
class ExpectedSamples:
    """Either `total`, over all tars, or `of_tar`: path of a tar in the folder -> samples."""

    total: int | None = None
    of_tar: Mapping[str, int] | None = None

    @classmethod
    def parse(cls, text: str) -> "ExpectedSamples":
        """A whole number, or the path of a JSON file such as {"train-000.tar": 1000}.

        Raises ValueError for anything else, FileNotFoundError for a missing file.
        """
        if text.isascii() and text.isdecimal():
            return cls(total=int(text))
        path = Path(text)
        if not path.is_file():
            raise FileNotFoundError(
                f"{text} is neither a number of samples nor a file: pass one of these"
            )
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{path} has over {_MAX_BYTES:,} bytes: pass a file of sample counts")
        try:
            counts = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON ({error}): correct it") from error
        return cls(of_tar=_checked(path, counts))

    def in_all(self, folder: Path, tars: Collection[Path]) -> int:
        """Samples expected in `tars`; ValueError names a tar without a count, or a count whose tar
        is not in `folder`."""
        if self.of_tar is None:
            assert self.total is not None
            return self.total
        names = {tar.relative_to(folder).as_posix() for tar in tars}
        if uncounted := sorted(names - self.of_tar.keys()):
            raise ValueError(f"{folder / uncounted[0]} has no expected number of samples: add it")
        if absent := sorted(name for name in self.of_tar if not (folder / name).is_file()):
            raise ValueError(
                f"{folder} has no {absent[0]!r}, in which {self.of_tar[absent[0]]:,} samples are "
                "expected: copy it there, or remove its count"
            )
        return sum(self.of_tar[name] for name in names)

    def mismatches(self, folder: Path, tars: Mapping[Path, int]) -> dict[Path, Skipped]:
        """The tars whose number of samples differs; for a total, `folder` instead of a tar.

        tars: the number of samples found in each.
        """
        if self.of_tar is None:
            wanted = {folder: (sum(tars.values()), self.in_all(folder, tars))}
        else:
            wanted = {
                tar: (found, self.of_tar[tar.relative_to(folder).as_posix()])
                for tar, found in tars.items()
            }
        return {
            place: Skipped(str(place), f"found {found:,} samples, expected {expected:,}")
            for place, (found, expected) in wanted.items()
            if found != expected
        }


def _checked(path: Path, counts: Any) -> dict[str, int]:
    if not isinstance(counts, dict):
        raise ValueError(f'{path} is not a JSON object such as {{"train-000.tar": 1000, …}}')
    for name, count in counts.items():
        if type(count) is not int or count < 0:
            raise ValueError(f"{path}: the count of {name!r} is {count!r}: pass a whole number")
    return counts
