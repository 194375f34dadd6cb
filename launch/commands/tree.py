"""`kway tree`: label trees from vectors, shards, encoders or hierarchies; and a look at one."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    import numpy as np

    from heads.tree.named_tree import NamedTree

app = typer.Typer(help="Build a label tree, or show one.", no_args_is_help=True)

_TRIVIAL_PROJECTION = 16


@dataclass(frozen=True)
class _Options:
    """What `build` was asked for, besides the source."""

    class_names: list[str] | None
    kind: Literal["vtree", "utree"]
    base: float
    metric: Literal["cosine", "euclidean"]
    project: int | None
    missing: Literal["error", "mean", "zero"]
    collapse: bool


@app.command()
def build(
    source: Annotated[
        Path,
        typer.Argument(
            help="label vectors (.npy, .npz, .safetensors, .bin, .vec, .txt), a folder of shards, "
            "a parent table (.csv, .tsv), a WordNet dict folder, or a transformers text encoder"
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="the tree file")],
    classes: Annotated[
        Path | None,
        typer.Option(help="class names: a file of one a line, or a folder of shards"),
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
    collapse: Annotated[
        bool, typer.Option("--collapse", help="of a hierarchy: take out nodes with a single child")
    ] = False,
) -> None:
    """Build a label tree that a recipe names as head.weights.tree.file."""
    started = time.monotonic()
    names = None if classes is None else _class_names(classes)
    options = _Options(names, kind, base, metric, project, missing, collapse)
    named = _build(source, options)
    named.save(out)
    _print_statistics(named, projected=project is not None or not _has_vectors(source))
    print(f"{out}: {time.monotonic() - started:.1f} s")


@app.command()
def show(
    tree: Annotated[Path, typer.Argument(help="a tree file")],
    picture: Annotated[
        Path | None, typer.Option(help="where the picture goes; default: beside the tree, .png")
    ] = None,
    rows: Annotated[int, typer.Option(min=4, max=500, help="names in the picture")] = 48,
) -> None:
    """Print what a label tree looks like and draw it, or its top, with names."""
    from heads.tree.named_tree import NamedTree
    from heads.tree.picture import draw_tree

    named = NamedTree.load(tree)
    _print_statistics(named, projected=False)
    path = tree.with_suffix(".png") if picture is None else picture
    num_drawn = draw_tree(
        named, path, rows=rows, title=f"{tree.name}: {len(named.classes):,} classes"
    )
    print(f"{path}: {num_drawn:,} of {named.tree.num_nodes:,} nodes")


def _has_vectors(source: Path) -> bool:
    return source.suffix not in (".csv", ".tsv") and not (source / "data.noun").is_file()


def _build(source: Path, options: _Options) -> "NamedTree":
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist: give label vectors or a hierarchy")
    if _has_vectors(source):
        if options.collapse:
            raise ValueError("--collapse is for hierarchies: a cover tree has no single children")
        return _from_vectors(source, options)
    if options.project is not None or options.kind != "vtree":
        raise ValueError(f"{source} is a hierarchy: --project and --kind utree are for vectors")
    return _from_hierarchy(source, options)


def _from_hierarchy(source: Path, options: _Options) -> "NamedTree":
    from heads.tree.hierarchy import read_parent_table
    from heads.tree.wordnet import read_wordnet

    if source.is_dir():
        wordnet = read_wordnet(source)
        return wordnet.tree(_needed(options.class_names, source), collapse=options.collapse)
    hierarchy = read_parent_table(source)
    if several := hierarchy.num_with_several_parents():
        print(
            f"note: {several:,} names in {source} have several parents: the first row counts",
            file=sys.stderr,
        )
    names = options.class_names or hierarchy.leaves()
    return hierarchy.tree(names, collapse=options.collapse)


def _from_vectors(source: Path, options: _Options) -> "NamedTree":
    from heads.tree import build_cover_tree
    from heads.tree.named_tree import NamedTree
    from heads.tree.vectors import project

    names, vectors = _vectors(source, options)
    if options.project is not None:
        vectors = project(vectors, options.project)
    cover = build_cover_tree(vectors, base=options.base, metric=options.metric)
    return NamedTree.of_cover_tree(cover, names, options.kind)


def _vectors(source: Path, options: _Options) -> tuple[Sequence[str], "np.ndarray"]:
    from heads.tree.encoder import encode_names
    from heads.tree.vectors import load_label_vectors, read_label_vectors

    if (source / "manifest.json").is_file():
        return _shard_vectors(source, options)
    if source.is_dir():
        names = _needed(options.class_names, source)
        return names, encode_names(source, names)
    if options.class_names is None:
        found, vectors = read_label_vectors(source)
        return _needed(found, source), vectors
    vectors, without = load_label_vectors(source, options.class_names, missing=options.missing)
    if without:
        shown = ", ".join(without[:10]) + (", …" if len(without) > 10 else "")
        filler = "the mean of the others" if options.missing == "mean" else "zeros"
        print(
            f"warning: {len(without):,} class names have no vector in {source} and got {filler}: "
            f"{shown}",
            file=sys.stderr,
        )
    return options.class_names, vectors


def _shard_vectors(source: Path, options: _Options) -> tuple[Sequence[str], "np.ndarray"]:
    from data import Manifest, load_label_vectors

    if options.class_names is not None:
        raise ValueError(f"{source} has its own class list: leave out --classes")
    manifest = Manifest.load(source)
    return [info.name for info in manifest.classes], load_label_vectors(source, manifest)


def _class_names(path: Path) -> list[str]:
    """From a folder of shards, or the lines of a file."""
    if path.is_dir():
        from data import Manifest

        return [info.name for info in Manifest.load(path).classes]
    if not path.is_file():
        raise FileNotFoundError(f"class names {path} do not exist: give a file of one name a line")
    names = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    while names and not names[-1]:
        names.pop()
    if not names or "" in names:
        raise ValueError(f"{path} has an empty line or no names: give one class name a line")
    return names


def _needed(names: list[str] | None, source: Path) -> list[str]:
    if names is None:
        raise ValueError(f"{source} names no classes: give them with --classes")
    return names


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
