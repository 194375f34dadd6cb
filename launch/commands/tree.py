"""`kway tree`: draws a label tree, or builds one from vectors, shards, an encoder or a hierarchy.

The path determines the kind of source. Options that apply to a different kind of source
are rejected.
"""

import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeVar

import typer

from data.messages import printable
from launch.options import RayAddress
from launch.output_path import explain_write_errors
from launch.terminal import progress, seconds_since

if TYPE_CHECKING:
    import numpy as np

    from heads.tree import NamedTree


app = typer.Typer(help="Build a label tree, or draw one.", no_args_is_help=True)

_TRIVIAL_PROJECTION = 16
Origin = Literal["vectors", "hierarchy"]
_OF_VECTORS = ("--kind", "--base", "--metric", "--project", "--missing", "--ray")
_Classes = TypeVar("_Classes")


@app.command()
def build(
    context: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="folder of shards, label vectors (.npy, .npz, .safetensors, .bin, .vec, .txt), "
            "parent table (.csv, .tsv), WordNet dict folder, or transformers text encoder",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="tree file to write")],
    classes: Annotated[
        Path | None,
        typer.Option(
            help="source of the class names: a file with one name per line, or a folder of shards"
        ),
    ] = None,
    origin: Annotated[
        Literal["vectors", "hierarchy"] | None,
        typer.Option(
            "--from",
            help="what to build the tree from if SOURCE is a folder of shards; default: its label "
            "vectors if it has any, otherwise its hierarchy",
        ),
    ] = None,
    kind: Annotated[
        Literal["vtree", "utree"],
        typer.Option(help="inner nodes of a cover tree: pseudoclasses (vtree) or classes (utree)"),
    ] = "vtree",
    base: Annotated[
        float,
        typer.Option(help="base of the cover tree; smaller values give deeper, narrower trees"),
    ] = 1.3,
    metric: Annotated[
        Literal["cosine", "euclidean"], typer.Option(help="distance between vectors")
    ] = "cosine",
    project: Annotated[
        int | None,
        typer.Option(min=1, help="number of principal components to project the vectors onto"),
    ] = None,
    missing: Annotated[
        Literal["error", "mean", "zero"],
        typer.Option(help="how to handle class names that are missing from the vector file"),
    ] = "error",
    keep_chains: Annotated[
        bool,
        typer.Option("--keep-chains", help="keep nodes of a hierarchy that have a single child"),
    ] = False,
    ray: RayAddress = None,
) -> None:
    """Build a label tree, for use as a recipe's head.weights.tree.file."""
    started = time.monotonic()
    class_list = None if classes is None else read_class_list(classes)
    given = given_options(context)
    options = TreeOptions(
        class_list, origin, kind, base, metric, project, missing, keep_chains, ray, given
    )
    named, used = build_named_tree(source, options)
    with explain_write_errors(out, "--out"):
        named.save(out)
    print(f"built from {'label vectors' if used == 'vectors' else 'the hierarchy'}")
    _print_statistics(named, projected=project is not None or used == "hierarchy")
    print(printable(f"{out}: {seconds_since(started)}"))


@app.command()
def show(
    tree: Annotated[Path, typer.Argument(metavar="TREE", help="tree file")],
    figure: Annotated[
        Path | None,
        typer.Option(help="output file; default: the path of the tree file with the suffix .png"),
    ] = None,
    rows: Annotated[
        int, typer.Option(min=4, max=500, help="maximum number of names in the figure")
    ] = 48,
) -> None:
    """Print statistics of a label tree and draw it, or its upper levels, with names."""
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
            "use other vectors, or dense class weights"
            if projected
            else "high-dimensional vectors without clusters are all equally far apart, so pass "
            f"--project {_TRIVIAL_PROJECTION}, or use other vectors"
        )
        print(
            f"warning: the tree is almost flat ({statistics.largest_family_share:.0%} of its nodes "
            f"are children of one node): {remedy}",
            file=sys.stderr,
        )


class ClassList(NamedTuple):
    """Class names, and a readable word for each. For ImageNet, the names are synset IDs."""

    names: list[str]
    words: list[str]


@dataclass(frozen=True)
class TreeOptions:
    """Options of `kway tree build` besides the source.

    origin: None uses label vectors if the shards contain any, otherwise the hierarchy.
    ray: the address of the Ray cluster that encodes class names, or None for this machine.
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
    ray: str | None
    given: frozenset[str]


def build_named_tree(source: Path, options: TreeOptions) -> "tuple[NamedTree, Origin]":
    """Build the label tree of a source. Returns the tree and the kind of source used.

    Raises ValueError or OSError for errors that the user can fix.
    """
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist: pass shards, vectors or a hierarchy")
    if (source / "manifest.json").is_file():
        return _from_shards(source, options)
    is_hierarchy = source.suffix in (".csv", ".tsv") or (source / "data.noun").is_file()
    origin: Origin = "hierarchy" if is_hierarchy else "vectors"
    if options.origin not in (None, origin):
        raise ValueError(f"--from is only for shards, but {source} contains {origin}: omit --from")
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
        names = [info.name for info in classes]
        return ClassList(names, [synonyms.split(", ")[0] for synonyms in words])
    from data.tars.labels import read_class_names

    names = read_class_names(path)
    return ClassList(names, names)


def _check(source: Path, origin: Origin, options: TreeOptions) -> None:
    if origin == "vectors":
        reject_options(
            options.given,
            ("--keep-chains",),
            "only for hierarchies, because every inner node of a cover tree has several children",
        )
    else:
        reject_options(
            options.given,
            _OF_VECTORS,
            f"only for label vectors, but {source} contains a hierarchy",
        )


def _from_shards(source: Path, options: TreeOptions) -> "tuple[NamedTree, Origin]":
    from data.shards.hierarchy import class_paths
    from data.shards.label_vectors import load_label_vectors
    from data.shards.manifest import Manifest
    from heads.tree import tree_of_paths

    if options.classes is not None:
        raise ValueError(f"{source} has its own class list: omit --classes")
    manifest = Manifest.read(source)
    names = manifest.class_names
    origin = options.origin or ("hierarchy" if manifest.label_vectors is None else "vectors")
    _check(source, origin, options)
    if origin == "vectors":
        reject_options(
            options.given,
            ("--missing", "--ray"),
            f"not for shards, and {source} contains a vector for each class",
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
        note = f"note: {several:,} names in {source} have several parents; using the first one"
        print(printable(note), file=sys.stderr)
    names = options.classes.names if options.classes else hierarchy.leaves()
    return hierarchy.tree(names, collapse=collapse)


def _cover_tree(names: Sequence[str], vectors: "np.ndarray", options: TreeOptions) -> "NamedTree":
    from heads.tree import NamedTree, build_cover_tree, project

    if options.project is not None:
        vectors = project(vectors, options.project)
    with progress("building the tree", "classes") as report:
        cover = build_cover_tree(vectors, base=options.base, metric=options.metric, report=report)
    return NamedTree.of_cover_tree(cover, names, options.kind)


def _vectors(source: Path, options: TreeOptions) -> tuple[Sequence[str], "np.ndarray"]:
    from heads.tree import load_label_vectors, read_label_vectors

    if source.is_dir():
        reject_options(
            options.given,
            ("--missing",),
            f"only for files of vectors, but {source} is a text encoder",
        )
        classes = _required(options.classes, source)
        return classes.names, _encoded(source, classes.words, options.ray)
    reject_options(
        options.given, ("--ray",), f"only for text encoders, but {source} contains vectors"
    )
    if options.classes is None:
        found, vectors = read_label_vectors(source)
        return _required(found, source), vectors
    names, words = options.classes
    vectors, without = load_label_vectors(source, words, missing=options.missing)
    if without:
        shown = ", ".join(without[:10]) + (", …" if len(without) > 10 else "")
        filler = "the mean vector" if options.missing == "mean" else "zeros"
        what = f"{len(without):,} class names have no vector in {source}; using {filler} instead"
        print(printable(f"warning: {what}: {shown}"), file=sys.stderr)
    return names, vectors


def _encoded(encoder: Path, words: Sequence[str], ray: str | None) -> "np.ndarray":
    from heads.tree import encode_names

    with progress("encoding", "class names") as report:
        if ray is None:
            return encode_names(encoder, words, report=report)
        import torch

        from data.processes import in_order
        from data.ray_pool import ray_pool

        # A task uses as many threads as this process would (see `encode_names`).
        with ray_pool(ray, cpus=torch.get_num_threads()) as pool:
            run = partial(in_order, pool, ahead=2 * pool.num_workers)
            return encode_names(encoder, words, run=run, report=report)


def _required(classes: _Classes | None, source: Path) -> _Classes:
    if classes is None:
        raise ValueError(f"{source} contains no class names: pass them with --classes")
    return classes


def given_options(context: typer.Context) -> frozenset[str]:
    """Return the options that were passed on the command line, such as `--min-count`."""
    return frozenset(
        parameter.opts[0]
        for parameter in context.command.params
        if (source := context.get_parameter_source(parameter.name or ""))
        and source.name == "COMMANDLINE"
    )


def reject_options(given: Collection[str], unsupported: Collection[str], why: str) -> None:
    """Raise ValueError with the option and `why` if any option in `unsupported` is given."""
    if named := sorted(set(given) & set(unsupported)):
        raise ValueError(f"{', '.join(named)}: {why}")
