"""`kway tree build`: builds a label tree from vectors, shards or a hierarchy.

The path determines the kind of source. Options of another kind of source are rejected.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer
from pydantic import BaseModel, ConfigDict, Field

from data.messages import printable
from data.option import Option
from launch.options import Given, build, options_of, with_options
from launch.output_path import explain_write_errors
from launch.terminal import progress, seconds_since

if TYPE_CHECKING:
    import numpy as np

    from heads.tree import NamedTree

app = typer.Typer(help="Build label trees.", no_args_is_help=True)

_TRIVIAL_PROJECTION = 16
_OF_VECTORS = ("kind", "base", "project", "missing")
_Names = TypeVar("_Names")


class TreeOptions(BaseModel):
    """Options of `kway tree build` besides the source and the output file."""

    model_config = ConfigDict(frozen=True)

    classes: Path | None = Field(
        None, description="class names: a file with one name per line, or a folder of shards"
    )
    origin: Annotated[Literal["vectors", "hierarchy"] | None, Option("--from")] = Field(
        None,
        description="what to use of a folder of shards; default: its label vectors if it has any, "
        "otherwise its hierarchy",
    )
    kind: Literal["vtree", "utree"] = Field(
        "vtree", description="inner nodes of a cover tree: pseudoclasses (vtree) or classes (utree)"
    )
    base: float = Field(
        1.3, description="base of the cover tree; smaller values give deeper, narrower trees"
    )
    project: int | None = Field(
        None, ge=1, description="number of principal components to project the vectors onto"
    )
    missing: Literal["error", "mean", "zero"] = Field(
        "error", description="how to handle class names that are missing from the vector file"
    )
    keep_chains: bool = Field(
        False, description="keep nodes of a hierarchy that have a single child"
    )


def build_tree(
    given: Given,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="folder of shards, label vectors (.npy, .npz, .bin, .vec, .txt), "
            "parent table (.csv, .tsv) or WordNet dict folder",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="tree file to write")],
) -> None:
    """Build a label tree, for use as a recipe's head.weights.tree.file."""
    from heads.tree.statistics import is_near_trivial, largest_family_share, statistics_of

    started = time.monotonic()
    options = build(TreeOptions, given)
    named, used = build_named_tree(source, options, given)
    with explain_write_errors(out, "--out"):
        named.save(out)
    print(f"built from {'label vectors' if used == 'vectors' else 'the hierarchy'}")
    print("\n".join(statistics_of(named.tree)))
    if is_near_trivial(named.tree):
        remedy = "use other vectors, or dense class weights"
        if options.project is None and used == "vectors":
            remedy = (
                "high-dimensional vectors without clusters are all equally far apart, so pass "
                f"--project {_TRIVIAL_PROJECTION}, or use other vectors"
            )
        share = f"{largest_family_share(named.tree):.0%}"
        print(
            f"warning: the tree is almost flat ({share} of its nodes are children of one node): "
            f"{remedy}",
            file=sys.stderr,
        )
    print(printable(f"{out}: {seconds_since(started)}"))


def build_named_tree(
    source: Path, options: TreeOptions, given: Given
) -> "tuple[NamedTree, Literal['vectors', 'hierarchy']]":
    """Build the label tree of a source. Returns the tree and the kind of source used.

    given: the options that were passed on the command line. Raises ValueError or OSError for errors
    that the user can fix.
    """
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist: pass shards, vectors or a hierarchy")
    is_shards = (source / "manifest.json").is_file()
    is_hierarchy = source.suffix in (".csv", ".tsv") or (source / "data.noun").is_file()
    if is_shards:
        from data.shards.manifest import Manifest

        has_vectors = Manifest.read(source).label_vectors is not None
        origin = options.origin or ("vectors" if has_vectors else "hierarchy")
        _reject(given, ("classes",), f"{source} has its own class list")
    else:
        origin = "hierarchy" if is_hierarchy else "vectors"
        _reject(given, ("origin",), f"only for shards, but {source} contains {origin}")
    if origin == "vectors":
        _reject(given, ("keep_chains",), "only for hierarchies; cover trees have no chains")
        return _cover_tree(*_vectors(source, options, given, is_shards=is_shards), options), origin
    _reject(given, _OF_VECTORS, f"only for label vectors, but {source} contains a hierarchy")
    return _from_hierarchy(source, options, is_shards=is_shards), origin


def _from_hierarchy(source: Path, options: TreeOptions, *, is_shards: bool) -> "NamedTree":
    from data.shards.hierarchy import class_paths
    from data.shards.manifest import Manifest
    from heads.tree import NamedTree, label_tree_of_paths, read_parent_table, read_wordnet

    collapse = not options.keep_chains
    if is_shards:
        manifest = Manifest.read(source)
        tree, pseudoclasses = label_tree_of_paths(*class_paths(source, manifest), collapse=collapse)
        return NamedTree(tree, tuple(manifest.class_names), pseudoclasses)
    names = None if options.classes is None else read_class_list(options.classes)[0]
    if source.is_dir():
        return read_wordnet(source).tree(_required(names, source), collapse=collapse)
    hierarchy = read_parent_table(source)
    if several := hierarchy.num_with_several_parents():
        note = f"note: {several:,} names in {source} have several parents; using the first one"
        print(printable(note), file=sys.stderr)
    return hierarchy.tree(names or hierarchy.leaves(), collapse=collapse)


def _cover_tree(names: Sequence[str], vectors: "np.ndarray", options: TreeOptions) -> "NamedTree":
    from heads.tree import NamedTree, build_cover_tree, project

    if options.project is not None:
        vectors = project(vectors, options.project)
    with progress("building the tree", "classes") as report:
        cover = build_cover_tree(vectors, base=options.base, report=report)
    return NamedTree.of_cover_tree(cover, names, options.kind)


def _vectors(
    source: Path, options: TreeOptions, given: Given, *, is_shards: bool
) -> "tuple[Sequence[str], np.ndarray]":
    from data.shards.label_vectors import load_label_vectors as load_of_shards
    from data.shards.manifest import Manifest
    from heads.tree import load_label_vectors, read_label_vectors

    if is_shards:
        _reject(given, ("missing",), f"{source} contains a vector for each class")
        manifest = Manifest.read(source)
        return manifest.class_names, load_of_shards(source, manifest)
    listed = None if options.classes is None else read_class_list(options.classes)
    if source.is_dir():
        raise ValueError(
            f"{source} is neither a folder of shards nor a WordNet dict folder: pass one of these, "
            "a file of vectors or a parent table"
        )
    if listed is None:
        found, vectors = read_label_vectors(source)
        return _required(found, source), vectors
    names, words = listed
    vectors, without = load_label_vectors(source, words, missing=options.missing)
    if without:
        shown = ", ".join(without[:10]) + (", …" if len(without) > 10 else "")
        filler = "the mean vector" if options.missing == "mean" else "zeros"
        what = f"{len(without):,} class names have no vector in {source}; using {filler} instead"
        print(printable(f"warning: {what}: {shown}"), file=sys.stderr)
    return names, vectors


def read_class_list(path: Path) -> tuple[list[str], list[str]]:
    """Read class names from a folder of shards, or from a file with one name per line.

    Returns the names, and a readable word for each. For ImageNet, the names are synset IDs.
    """
    if path.is_dir():
        from data.shards.manifest import Manifest

        classes = Manifest.read(path).classes
        words = [info.attributes.get("words") or info.name for info in classes]
        return [info.name for info in classes], [synonyms.split(", ")[0] for synonyms in words]
    from data.tars.labels import read_class_names

    names = read_class_names(path)
    return names, names


def _required(names: _Names | None, source: Path) -> _Names:
    if names is None:
        raise ValueError(f"{source} contains no class names: pass them with --classes")
    return names


def _reject(given: Given, unsupported: Sequence[str], why: str) -> None:
    """Raise ValueError with the options and `why` if any of the `unsupported` fields is given."""
    options = options_of(TreeOptions)
    if named := sorted(options[name].names for name in given if name in unsupported):
        raise ValueError(f"{', '.join(named)}: {why}")


app.callback()(lambda: None)  # otherwise `kway tree` would be the command itself
app.command("build")(with_options(build_tree, options_of(TreeOptions)))
