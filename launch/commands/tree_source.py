"""From what `kway tree build` is given to a label tree: shards, files of vectors, hierarchies.

What kind of source it is shows in the path; options that another kind has are errors.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from launch.commands.given import refuse
from launch.wording import printable

if TYPE_CHECKING:
    import numpy as np

    from heads.tree import NamedTree

Origin = Literal["vectors", "hierarchy"]
_OF_VECTORS = ("--kind", "--base", "--metric", "--project", "--missing")
_Classes = TypeVar("_Classes")


class ClassList(NamedTuple):
    """Names of classes, and what they are called in words: ImageNet's names are synset ids."""

    names: list[str]
    words: list[str]


@dataclass(frozen=True)
class TreeOptions:
    """What was asked for, besides the source; `origin` None: label vectors where there are any.

    given: the options that stand on the command line.
    """

    classes: ClassList | None
    origin: Origin | None
    kind: Literal["vtree", "utree"]
    base: float
    metric: Literal["cosine", "euclidean"]
    project: int | None
    missing: Literal["error", "mean", "zero"]
    keep_chains: bool
    given: frozenset[str]


def build_named_tree(source: Path, options: TreeOptions) -> "tuple[NamedTree, Origin]":
    """The label tree of a source, and what it is made of.

    Raises ValueError and OSError for what a user can mend.
    """
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist: give shards, vectors or a hierarchy")
    if (source / "manifest.json").is_file():
        return _from_shards(source, options)
    is_hierarchy = source.suffix in (".csv", ".tsv") or (source / "data.noun").is_file()
    origin: Origin = "hierarchy" if is_hierarchy else "vectors"
    if options.origin not in (None, origin):
        raise ValueError(f"{source} gives {origin}: leave out --from")
    _check(source, origin, options)
    if is_hierarchy:
        return _from_hierarchy(source, options), origin
    return _cover_tree(*_vectors(source, options), options), origin


def read_class_list(path: Path) -> ClassList:
    """From a folder of shards, or the lines of a file."""
    if path.is_dir():
        from data.shards.manifest import Manifest

        classes = Manifest.read(path).classes
        words = [info.attributes.get("words") or info.name for info in classes]
        return ClassList([info.name for info in classes], [one.split(", ")[0] for one in words])
    from data.tars.labels import read_class_names

    names = read_class_names(path)
    return ClassList(names, names)


def _check(source: Path, origin: Origin, options: TreeOptions) -> None:
    if origin == "vectors":
        refuse(options.given, ("--keep-chains",), "for hierarchies: a cover tree has no such nodes")
    else:
        refuse(options.given, _OF_VECTORS, f"for label vectors, and {source} gives a hierarchy")


def _from_shards(source: Path, options: TreeOptions) -> "tuple[NamedTree, Origin]":
    from data.shards.hierarchy import class_paths
    from data.shards.label_vectors import load_label_vectors
    from data.shards.manifest import Manifest
    from heads.tree import tree_of_paths

    if options.classes is not None:
        raise ValueError(f"{source} has its own class list: leave out --classes")
    manifest = Manifest.read(source)
    names = manifest.class_names
    origin = options.origin or ("hierarchy" if manifest.label_vectors is None else "vectors")
    _check(source, origin, options)
    if origin == "vectors":
        refuse(options.given, ("--missing",), f"for files of vectors; {source} has one a class")
        return _cover_tree(names, load_label_vectors(source, manifest), options), origin
    paths = class_paths(source, manifest)
    return tree_of_paths(names, paths, collapse=not options.keep_chains), origin


def _from_hierarchy(source: Path, options: TreeOptions) -> "NamedTree":
    from heads.tree import read_parent_table, read_wordnet

    collapse = not options.keep_chains
    if source.is_dir():
        names = _needed(options.classes, source).names
        return read_wordnet(source).tree(names, collapse=collapse)
    hierarchy = read_parent_table(source)
    if several := hierarchy.num_with_several_parents():
        note = f"note: {several:,} names in {source} have several parents: the first row counts"
        print(printable(note), file=sys.stderr)
    names = options.classes.names if options.classes else hierarchy.leaves()
    return hierarchy.tree(names, collapse=collapse)


def _cover_tree(names: Sequence[str], vectors: "np.ndarray", options: TreeOptions) -> "NamedTree":
    from heads.tree import NamedTree, build_cover_tree, project

    if options.project is not None:
        vectors = project(vectors, options.project)
    cover = build_cover_tree(vectors, base=options.base, metric=options.metric)
    return NamedTree.of_cover_tree(cover, names, options.kind)


def _vectors(source: Path, options: TreeOptions) -> tuple[Sequence[str], "np.ndarray"]:
    from heads.tree import encode_names, load_label_vectors, read_label_vectors

    if source.is_dir():
        refuse(options.given, ("--missing",), f"for files of vectors; {source} is a text encoder")
        classes = _needed(options.classes, source)
        return classes.names, encode_names(source, classes.words)
    if options.classes is None:
        found, vectors = read_label_vectors(source)
        return _needed(found, source), vectors
    names, words = options.classes
    vectors, without = load_label_vectors(source, words, missing=options.missing)
    if without:
        shown = ", ".join(without[:10]) + (", …" if len(without) > 10 else "")
        filler = "the mean of the others" if options.missing == "mean" else "zeros"
        what = f"{len(without):,} class names have no vector in {source} and got {filler}"
        print(printable(f"warning: {what}: {shown}"), file=sys.stderr)
    return names, vectors


def _needed(classes: _Classes | None, source: Path) -> _Classes:
    if classes is None:
        raise ValueError(f"{source} names no classes: give them with --classes")
    return classes
