"""What the shard writer needs of a source: a description, a class list, tasks, and samples.

A source is sent to worker processes once, so it keeps its own state small and opens files late.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from data.shards.manifest import ClassInfo, SourceInfo
from data.skipped import Skipped


@dataclass(frozen=True)
class Sample:
    """One sample as it stands in a shard: `<key>.<extension>` and `<key>.cls`."""

    key: str
    data: bytes
    extension: str
    label: int


Modality = Literal["image", "text"]


class Source(Protocol):
    """Where samples come from. Equal descriptions give equal samples, byte for byte."""

    @property
    def modality(self) -> Modality:
        """What its samples are."""
        ...

    def describe(self) -> SourceInfo:
        """Kind and parameters; decides whether an unfinished folder may be gone on with."""
        ...

    def classes(self) -> tuple[ClassInfo, ...]:
        """The class list; a label is a position in it."""
        ...

    def label_vectors(self) -> np.ndarray | None:
        """One vector a class, float32 [K, D], where the source knows any."""
        ...

    def splits(self) -> dict[str, Sequence[Any]]:
        """Small tasks, one per sample, by split name (`data/shards/split_names.py`)."""
        ...

    def render(self, task: Any) -> Sample | Skipped:
        """Make the sample or return why it is skipped. ValueError names the problem and the fix."""
        ...
