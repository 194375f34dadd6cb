"""The development kit of ILSVRC 2012: synsets, their parents, and the validation labels.

It is read from the published `ILSVRC2012_devkit_t12.tar.gz` or its unpacked folder.
"""

import io
import struct
import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.io import loadmat
from scipy.io.matlab import MatReadError

from data.remote.input_path import InputPath
from data.sources.archive import archived_files, loose_files

DEVKIT = "ILSVRC2012_devkit_t12"
_META = "meta.mat"
_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_FIELDS = ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children")
_NUM_IMAGES = "num_train_images"
# Exceptions that scipy raises for a damaged file or a different version of the file.
_DAMAGE = (
    MatReadError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    OSError,
    EOFError,
    NotImplementedError,
    struct.error,
    zlib.error,
)


@dataclass(frozen=True)
class Synset:
    """A synset. parents: the synsets directly above it, in order. num_images: the number of
    training images, or 0 if unknown.
    """

    wnid: str
    words: str
    gloss: str
    parents: tuple[str, ...]
    num_images: int


@dataclass(frozen=True)
class Devkit:
    """A taxonomy of synsets by WordNet ID. `truth[i]` is the synset of validation image i + 1."""

    path: InputPath
    synsets: Mapping[str, Synset]
    truth: tuple[str, ...]

    @property
    def origin(self) -> str:
        return str(self.path)

    def synset(self, class_name: str) -> str:
        """Return `class_name`, because ImageNet classes are named by their WordNet IDs."""
        return class_name

    def words(self, synset: str) -> str:
        return self.synsets[synset].words

    def parents(self, synset: str) -> tuple[str, ...]:
        return self.synsets[synset].parents


def read_devkit(path: InputPath) -> Devkit:
    """Read the devkit from the archive, or from a folder that contains `data/` or its two
    files.

    Raises FileNotFoundError if a file is missing, and ValueError if a file is damaged.
    """
    found = _files(path)
    if missing := {_META, _TRUTH} - found.keys():
        raise FileNotFoundError(
            f"{path} does not contain data/{min(missing)}: pass the published {DEVKIT}.tar.gz"
        )
    try:
        by_id = _synsets(found[_META])
    except _DAMAGE as error:
        about = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: {_META} is damaged ({about}): download it again") from error
    truth = _truth(found[_TRUTH], by_id, path)
    return Devkit(path, {synset.wnid: synset for synset in by_id.values()}, truth)


def _files(path: InputPath) -> dict[str, bytes]:
    if path.is_dir():
        return loose_files(path / "data" if (path / "data").is_dir() else path, (_META, _TRUTH))
    if not path.is_file():
        raise FileNotFoundError(f"devkit {path} does not exist: pass {DEVKIT}.tar.gz or its folder")
    return archived_files(path, (_META, _TRUTH))


def _synsets(content: bytes) -> dict[int, Synset]:
    """Return the synsets by ILSVRC2012_ID, which is also the ID used in `children`."""
    table = np.atleast_1d(loadmat(io.BytesIO(content), squeeze_me=True)["synsets"])
    if missing := [name for name in _FIELDS if name not in (table.dtype.names or ())]:
        raise ValueError(f"its synsets do not have the field {missing[0]}")
    wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in table}
    parents: defaultdict[int, list[str]] = defaultdict(list)
    for row in table:
        for child in np.atleast_1d(row["children"])[: int(row["num_children"])]:
            if int(child) not in wnids:
                raise ValueError(f"synset {row['WNID']} has the unknown child {int(child)}")
            parents[int(child)].append(str(row["WNID"]))
    return {
        int(row["ILSVRC2012_ID"]): Synset(
            wnid=str(row["WNID"]),
            words=_text(row["words"]),
            gloss=_text(row["gloss"]),
            parents=tuple(parents[int(row["ILSVRC2012_ID"])]),
            num_images=int(row[_NUM_IMAGES]) if _NUM_IMAGES in (table.dtype.names or ()) else 0,
        )
        for row in table
    }


def _text(value: object) -> str:
    """Convert MATLAB text to a string. An empty MATLAB string is an empty array."""
    return "" if isinstance(value, np.ndarray) and not value.size else str(value)


def _truth(content: bytes, by_id: Mapping[int, Synset], path: InputPath) -> tuple[str, ...]:
    wnids = []
    for number, line in enumerate(content.decode("ascii", "replace").split(), 1):
        if not line.isdecimal() or int(line) not in by_id:
            raise ValueError(
                f"{path}: {_TRUTH}, line {number}: {line[:20]!r} is not an ILSVRC2012_ID in "
                f"{_META}: download the devkit again"
            )
        wnids.append(by_id[int(line)].wnid)
    return tuple(wnids)
