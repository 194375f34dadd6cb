"""Classes in a taxonomy such as WordNet or ImageNet's development kit.

A synset may have several parents. The path of a class uses the first parent listed.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Protocol, runtime_checkable

from pydantic import Field

from data.option import Option
from data.shards.hierarchy import PATH, join_path
from data.shards.manifest import ClassInfo


@runtime_checkable
class Taxonomy(Protocol):
    """Synsets by ID. `synset` and `parents` raise ValueError for unknown names."""

    @property
    def origin(self) -> str:
        """The name of the taxonomy, for messages."""

    def synset(self, class_name: str) -> str:
        """Return the synset of the class with this name."""

    def words(self, synset: str) -> str:
        """Return the names of a synset, best first, separated by a comma and a space."""

    def parents(self, synset: str) -> tuple[str, ...]:
        """Return the synsets directly above a synset. The result is empty for a root."""


TaxonomyOption = Annotated[
    Taxonomy | None,
    Option("--wordnet", type=Path),
    Field(
        description="WordNet dict folder that provides words and a hierarchy for classes named by "
        "synset"
    ),
]


@dataclass(frozen=True)
class ClassTaxonomy:
    """The classes with the given names in a taxonomy.

    The methods raise ValueError for a class that is missing from the taxonomy, and for a cycle.
    """

    taxonomy: Taxonomy
    class_names: Sequence[str]

    def attributes(self) -> list[dict[str, str]]:
        """Return `words`, `parents` (synsets separated by spaces) and `path` of each class.

        The name of a node in a path is the first of its words. Its synset is added if a sibling or
        a node above it has the same name.
        """
        chains = _above(self._chains)
        names = _node_names(self.taxonomy, chains)
        attributes = []
        for (*_, synset), chain in zip(self._chains, chains, strict=True):
            about = {"words": self.taxonomy.words(synset)}
            if parents := self.taxonomy.parents(synset):
                about["parents"] = " ".join(parents)
            if chain:
                about[PATH] = join_path([names[node] for node in chain])
            attributes.append(about)
        return attributes

    def notes(self) -> list[str]:
        """Return one line if there are synsets with several parents."""
        nodes = {node for chain in self._chains for node in chain}
        several = [node for node in nodes if len(self.taxonomy.parents(node)) > 1]
        if not several:
            return []
        return [
            f"{len(several):,} synsets of the hierarchy have several parents: `{PATH}` uses the "
            f"first one in {self.taxonomy.origin}"
        ]

    @cached_property
    def _chains(self) -> list[tuple[str, ...]]:
        """For each class, the synsets from the root down to the synset of the class."""
        return _chains(self.taxonomy, [self.taxonomy.synset(name) for name in self.class_names])


def _chains(taxonomy: Taxonomy, synsets: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the synsets from the root down to each of `synsets`."""
    known: dict[str, tuple[str, ...]] = {}
    for synset in synsets:
        for node in reversed(list(_ancestors(taxonomy, synset, known))):
            up = next(iter(taxonomy.parents(node)), None)
            known[node] = (*(known[up] if up else ()), node)
    return [known[synset] for synset in synsets]


def _ancestors(taxonomy: Taxonomy, synset: str, known: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield the synset and its ancestors, up to the first one in `known`."""
    seen = set()
    at: str | None = synset
    while at is not None and at not in known:
        if at in seen:
            raise ValueError(
                f"{taxonomy.origin}: {at}, an ancestor of class {synset}, is its own ancestor: "
                "download it again"
            )
        seen.add(at)
        yield at
        at = next(iter(taxonomy.parents(at)), None)


def _above(chains: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Remove the last synset from each chain unless other classes are below it or share it."""
    inner = {node for chain in chains for node in chain[:-1]}
    inner |= {node for node, count in Counter(c[-1] for c in chains).items() if count > 1}
    return [chain if chain[-1] in inner else chain[:-1] for chain in chains]


def _node_names(taxonomy: Taxonomy, chains: Sequence[tuple[str, ...]]) -> dict[str, str]:
    """Return the names of the nodes, which are distinct among siblings and differ from the names of
    their ancestors.
    """
    above = {node: chain[:i] for chain in set(chains) for i, node in enumerate(chain)}
    first = {node: taxonomy.words(node).split(", ")[0] or node for node in above}
    same_name = Counter((up[-1:], first[node]) for node, up in above.items())

    def name(node: str) -> str:
        up = above[node]
        repeats = same_name[up[-1:], first[node]] > 1 or first[node] in {first[one] for one in up}
        return f"{first[node]} ({node})" if repeats else first[node]

    return {node: name(node) for node in above}


def classes_digest(classes: Sequence[ClassInfo]) -> str:
    """Return 16 hexadecimal digits for the names of the classes, their order and attributes."""
    content = repr([info.model_dump() for info in classes]).encode()
    return hashlib.sha256(content).hexdigest()[:16]
