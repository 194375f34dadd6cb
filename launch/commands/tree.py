"""`kway tree`: builds a label tree from vectors, shards, encoders or hierarchies, or shows one.

The path determines the kind of source. Options of another kind of source are errors.
"""

import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeVar

import typer

from data.messages import printable
from launch.output_path import explain_write_errors
from launch.terminal import seconds_since

if TYPE_CHECKING:
    import numpy as np

    from heads.tree import NamedTree


app = typer.Typer(help="Build a label tree, or show one.", no_args_is_help=True)

_TRIVIAL_PROJECTION = 16
Origin = Literal["vectors", "hierarchy"]
_OF_VECTORS = ("--kind", "--base", "--metric", "--project", "--missing")
_Classes = TypeVar("_Classes")


@app.command()
def build(
    context: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            help="a folder of shards, label vectors (.npy, .npz, .safetensors, .bin, .vec, .txt), "
            "a parent table (.csv, .tsv), a WordNet dict folder, or a transformers text encoder"
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="the tree file")],
    classes: Annotated[
        Path | None,
        typer.Option(help="class names: a file of one a line, or a folder of shards"),
    ] = None,
    origin: Annotated[
        Literal["vectors", "hierarchy"] | None,
        typer.Option("--from", help="of shards; default: label vectors, hierarchy without them"),
    ] = None,
    kind: Annotated[
        Literal["vtree", "utree"],
        typer.Option(help="of vectors: inner nodes are pseudoclasses, or classes themselves"),
    ] = "vtree",
    base: Annotated[float, typer.Option(help="of vectors: smaller is taller and narrower")] = 1.3,
    metric: Annotated[Literal["cosine", "euclidean"], typer.Option(help="of vectors")] = "cosine",
    project: Annotated[
        int | None, typer.Option(min=1, help="of vectors: that many principal components first")
    ] = None,
    missing: Annotated[
        Literal["error", "mean", "zero"],
        typer.Option(help="what becomes of a class name that the file has no vector for"),
    ] = "error",
    keep_chains: Annotated[
        bool,
        typer.Option("--keep-chains", help="of a hierarchy: keep nodes with a single child, too"),
    ] = False,
) -> None:
    """Build a label tree that a recipe names as head.weights.tree.file."""
    started = time.monotonic()
    class_list = None if classes is None else read_class_list(classes)
    given = given_options(context)
    options = TreeOptions(
        class_list, origin, kind, base, metric, project, missing, keep_chains, given
    )
    named, made_of = build_named_tree(source, options)
    with explain_write_errors(out, "--out"):
        named.save(out)
    print(f"made of {'label vectors' if made_of == 'vectors' else 'the hierarchy'}")
    _print_statistics(named, projected=project is not None or made_of == "hierarchy")
    print(printable(f"{out}: {seconds_since(started)}"))


@app.command()
def show(
    tree: Annotated[Path, typer.Argument(help="a tree file")],
    figure: Annotated[
        Path | None,
        typer.Option(help="output file; default: the tree's path with suffix .png"),
    ] = None,
    rows: Annotated[int, typer.Option(min=4, max=500, help="names in the figure")] = 48,
) -> None:
    """Print what a label tree looks like and draw it, or its top, with names."""
    from heads.tree import NamedTree
    from heads.tree.drawing import draw_tree

    named = NamedTree.load(tree)
    _print_statistics(named, projected=False)
    path = tree.with_suffix(".png") if figure is None else figure
    title = f"{tree.name}: {len(named.classes):,} classes"
    with explain_write_errors(path, "--figure"):
        num_drawn = draw_tree(named, path, rows=rows, title=title)
    print(printable(f"{path}: {num_drawn:,} of {named.tree.num_nodes:,} nodes"))


def _print_statistics(named: "NamedTree", *, projected: bool) -> None:
    from heads.tree.statistics import TreeStatistics

    statistics = TreeStatistics.of(named.tree)
    print("\n".join(statistics.lines()))
    if statistics.near_trivial:
        remedy = (
            "take other vectors, or dense class weights"
            if projected
            else "vectors of many dimensions that form no clusters are all equally far apart; "
            f"build it with --project {_TRIVIAL_PROJECTION}, or take other vectors"
        )
        print(
            f"warning: the tree is near-trivial, {statistics.largest_family_share:.0%} of its "
            f"nodes hang side by side under one: {remedy}",
            file=sys.stderr,
        )


class ClassList(NamedTuple):
    """Names of classes, and the words for them; for ImageNet, the names are synset ids."""

    names: list[str]
    words: list[str]


@dataclass(frozen=True)
class TreeOptions:
    """Options of `kway tree build` besides the source.

    origin: None uses label vectors if the shards have any, otherwise the hierarchy.
    given: the options that were passed on the command line.
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
    """Build the label tree of a source. Also returns whether it is made of vectors or a hierarchy.

    Raises ValueError or OSError for errors that the user can fix.
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
    """Read class names from a folder of shards, or from a file with one name per line."""
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
        reject_options(
            options.given, ("--keep-chains",), "for hierarchies: a cover tree has no such nodes"
        )
    else:
        reject_options(
            options.given, _OF_VECTORS, f"for label vectors, and {source} gives a hierarchy"
        )


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
        reject_options(
            options.given, ("--missing",), f"for files of vectors; {source} has one a class"
        )
        return _cover_tree(names, load_label_vectors(source, manifest), options), origin
    paths = class_paths(source, manifest)
    return tree_of_paths(names, paths, collapse=not options.keep_chains), origin


def _from_hierarchy(source: Path, options: TreeOptions) -> "NamedTree":
    from heads.tree import read_parent_table, read_wordnet

    collapse = not options.keep_chains
    if source.is_dir():
        names = _required(options.classes, source).names
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
        reject_options(
            options.given, ("--missing",), f"for files of vectors; {source} is a text encoder"
        )
        classes = _required(options.classes, source)
        return classes.names, encode_names(source, classes.words)
    if options.classes is None:
        found, vectors = read_label_vectors(source)
        return _required(found, source), vectors
    names, words = options.classes
    vectors, without = load_label_vectors(source, words, missing=options.missing)
    if without:
        shown = ", ".join(without[:10]) + (", …" if len(without) > 10 else "")
        filler = "the mean of the others" if options.missing == "mean" else "zeros"
        what = f"{len(without):,} class names have no vector in {source} and got {filler}"
        print(printable(f"warning: {what}: {shown}"), file=sys.stderr)
    return names, vectors


def _required(classes: _Classes | None, source: Path) -> _Classes:
    if classes is None:
        raise ValueError(f"{source} names no classes: give them with --classes")
    return classes


def given_options(context: typer.Context) -> frozenset[str]:
    """The options that were passed on the command line, such as `--min-count`."""
    return frozenset(
        parameter.opts[0]
        for parameter in context.command.params
        if (source := context.get_parameter_source(parameter.name or ""))
        and source.name == "COMMANDLINE"
    )


def reject_options(given: Collection[str], not_taken: Collection[str], why: str) -> None:
    """Raise ValueError with `why` if any option in `not_taken` is given, and name the option."""
    if named := sorted(set(given) & set(not_taken)):
        raise ValueError(f"{', '.join(named)}: {why}")
