"""The development kit of ILSVRC 2012: synsets, their parents, and the validation labels.

It is read from the published `ILSVRC2012_devkit_t12.tar.gz` or its unpacked folder.
"""

import io
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.io import loadmat

from data.messages import one_line
from data.shards.hierarchy import PATH, join_path
from data.sources.archive import published_files

DEVKIT = "ILSVRC2012_devkit_t12"
_META = "meta.mat"
_TRUTH = "ILSVRC2012_validation_ground_truth.txt"


@dataclass(frozen=True)
class Synset:
    """A synset. parents: the synsets directly above it, in order."""

    words: str
    gloss: str
    parents: tuple[str, ...]


@dataclass(frozen=True)
class Devkit:
    """Synsets by WordNet ID. `truth[i]` is the synset of validation image i + 1."""

    path: Path
    synsets: Mapping[str, Synset]
    truth: tuple[str, ...]

    def attributes(self, classes: Sequence[str]) -> list[dict[str, str]]:
        """Return `words`, `parents` (synsets separated by spaces), `path` and `gloss` of classes.

        A path uses the first parent of each synset. The name of a node is the first of its words,
        with its synset if a sibling or a node above it has the same name.
        """
        chains = [self._chain(wnid) for wnid in classes]
        inner = {node for chain in chains for node in chain[:-1]}
        paths = [chain if chain[-1] in inner else chain[:-1] for chain in chains]
        names = self._node_names(paths)
        attributes = []
        for wnid, path in zip(classes, paths, strict=True):
            synset = self.synsets[wnid]
            about = {"words": synset.words}
            if synset.parents:
                about["parents"] = " ".join(synset.parents)
            if path:
                about[PATH] = join_path([names[node] for node in path])
            attributes.append({**about, "gloss": synset.gloss})
        return attributes

    def _chain(self, wnid: str) -> list[str]:
        """Return the synsets from the root down to a synset."""
        chain = [wnid]
        while parents := self.synsets[chain[0]].parents:
            chain.insert(0, parents[0])
        return chain

    def _node_names(self, paths: Sequence[Sequence[str]]) -> dict[str, str]:
        above = {node: tuple(path[:i]) for path in paths for i, node in enumerate(path)}
        first = {node: self.synsets[node].words.split(", ")[0] or node for node in above}
        same_name = Counter((up[-1:], first[node]) for node, up in above.items())
        names = {}
        for node, up in above.items():
            repeats = same_name[up[-1:], first[node]] > 1 or first[node] in map(first.get, up)
            names[node] = f"{first[node]} ({node})" if repeats else first[node]
        return names


def read_devkit(path: Path) -> Devkit:
    """Read the devkit from the archive, or from a folder with `data/` or its two files.

    Raises FileNotFoundError if a file is missing, and ValueError if a file is damaged.
    """
    archive = f"--devkit with the published {DEVKIT}.tar.gz"
    found = published_files(path, "data", (_META, _TRUTH), archive)
    try:
        wnids, synsets = _synsets(found[_META])
    except Exception as error:  # scipy raises arbitrary errors for a damaged or different file
        raise ValueError(
            f"{path}: {_META} is damaged ({one_line(error, 100)}): download it again"
        ) from error
    truth = []
    for number, line in enumerate(found[_TRUTH].decode("ascii", "replace").split(), 1):
        if not line.isdecimal() or int(line) not in wnids:
            raise ValueError(
                f"{path}: {_TRUTH}, line {number}: {line[:20]!r} is not an ILSVRC2012_ID in "
                f"{_META}: download the devkit again"
            )
        truth.append(wnids[int(line)])
    return Devkit(path, synsets, tuple(truth))


def _synsets(content: bytes) -> tuple[dict[int, str], dict[str, Synset]]:
    """Return the WordNet IDs by ILSVRC2012_ID, which `children` contains, and the synsets."""
    table = np.atleast_1d(loadmat(io.BytesIO(content), squeeze_me=True)["synsets"])
    wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in table}
    parents: defaultdict[str, list[str]] = defaultdict(list)
    for row in table:
        for child in np.atleast_1d(row["children"])[: int(row["num_children"])]:
            parents[wnids[int(child)]].append(str(row["WNID"]))
    return wnids, {
        wnid: Synset(
            words=_text(row["words"]),
            gloss=_text(row["gloss"]),
            parents=tuple(parents[wnid]),
        )
        for wnid, row in zip(wnids.values(), table, strict=True)
    }


def _text(value: object) -> str:
    """Convert MATLAB text to a string. An empty MATLAB string is an empty array."""
    return "" if isinstance(value, np.ndarray) and not value.size else str(value)
