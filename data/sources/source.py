"""The interface of sources, which the shard writer and `kway shard` use.

A source is pickled once per worker process: keep its state small, and open files when needed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from data.classes.class_list import ClassInfo
from data.shards.index import Label
from data.shards.manifest import SourceInfo
from data.skipped import Skipped

# A source is a pydantic dataclass, so invalid and unknown options are rejected wherever it is
# created. Arbitrary types are allowed because a callback is a field.
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
Modality = Literal["image", "text"]


class Sample(NamedTuple):
    """A sample as stored in a shard: `<key>.<extension>` and `<key>.cls`.

    label: its class or, if all samples of the source have sets of labels, its classes in any order.
    """

    key: str
    data: bytes
    extension: str
    label: Label


class Source(ABC):
    """A source of samples. Sources with equal descriptions produce byte-identical samples.

    `data/sources/__init__.py` lists the sources that `kway shard KIND` offers. Each is a frozen
    pydantic dataclass. Its fields define the command's options, with their defaults, bounds and
    descriptions, and its docstring is the command's help. A field marked `Supplied` is not an
    option. The command supplies `work` (a folder for temporary files), `workers`, and `report` (a
    callback for the progress of the work that precedes writing).

    The help shows `reads`, the input with its download size, and `held_out`, the samples that are
    not used for training. `reads_first` means that the classes are known only after a pass over all
    input.
    """

    kind: ClassVar[str]
    modality: ClassVar[Modality]
    reads: ClassVar[str]
    held_out: ClassVar[str]
    reads_first: ClassVar[bool] = False

    def describe(self) -> SourceInfo:
        """Return the kind and parameters.

        An unfinished folder is resumed only if these are unchanged.
        """
        return SourceInfo(kind=self.kind, parameters=self.parameters())

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """Return the options, and digests of the input and of packages, that determine the
        samples.
        """

    @abstractmethod
    def classes(self) -> Sequence[ClassInfo]:
        """Return the class list. A label is a position in this list."""

    def label_vectors(self) -> np.ndarray | None:
        """Return one vector per class, float32 [K, D], or None if there are none."""
        return None

    @abstractmethod
    def splits(self) -> dict[str, Sequence[Any]]:
        """Return small tasks, one per sample, by split name (`data/shards/split_names.py`)."""

    @abstractmethod
    def render(self, task: Any) -> Sample | Skipped:
        """Create the sample, or return the reason why it is skipped.

        Raises ValueError, with the problem and the fix, for invalid input.
        """

    def announcement(self) -> str | None:
        """Return a line to print first if the source chooses the test split by a hash."""
        return None

    def notes(self) -> list[str]:
        """Return one line for each item that is missing, skipped or chosen without an error."""
        return []

    def skipped(self) -> list[Skipped]:
        """Return the files and folders that are not read. The command prints some of them."""
        return []

    def clean_up(self) -> None:
        """Delete temporary files. This is called when the shards have been written or the input is
        invalid.
        """
        return

    def __getstate__(self) -> dict[str, Any]:
        # Workers only render samples. They do not need cached listings, class lists or open files.
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_")}


@dataclass(frozen=True, config=STRICT)
class HeldOutByHash(Source):
    """A source that chooses the test split by a hash if its input has no splits."""

    # For inherited fields, pydantic reads `kw_only` from each field, not from the decorator.
    test_fraction: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        kw_only=True,
        description="fraction of samples to hold out, chosen by a hash, if the input has no splits",
    )

    @abstractmethod
    def without_splits(self) -> str | None:
        """Return why the split is random, or None if it is not."""

    def announcement(self) -> str | None:
        why = self.without_splits() if self.test_fraction else None
        if why is None:
            return None
        return f"random split, because {why}: {self.test_fraction:.0%} of the samples become `test`"
