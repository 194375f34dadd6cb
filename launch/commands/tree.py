"""`kway tree build`: builds a label tree from vectors, shards or a hierarchy.

The path determines the kind of source. Options of another kind of source are rejected.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
# The options that apply to each kind of source.
_FOR_VECTORS = ("kind", "base", "project")
_OPTIONS = {
    "the label vectors of shards": ("origin", *_FOR_VECTORS),
    "the hierarchy of shards": ("origin", "keep_chains"),
    "label vectors": ("classes", "missing", *_FOR_VECTORS),
    "a hierarchy": ("classes", "keep_chains"),
}


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
    kind = _kind_of(source, options)
    named_options = options_of(TreeOptions)
    if others := sorted(named_options[o].names for o in given if o not in _OPTIONS[kind]):
        raise ValueError(f"{', '.join(others)} cannot be used with {kind}, which {source} contains")
    named = _hierarchy(source, options) if "hierarchy" in kind else _cover_tree(source, options)
    with explain_write_errors(out, "--out"):
        named.save(out)
    print(f"built from {kind}")
    print("\n".join(statistics_of(named.tree)))
    if is_near_trivial(named.tree):
        remedy = "use other vectors, or dense class weights"
        if options.project is None and "vectors" in kind:
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


def _kind_of(source: Path, options: TreeOptions) -> str:
    """Return the key in `_OPTIONS` of what the tree is built from."""
    if _is_shards(source):
        from data.shards.manifest import Manifest

        has_vectors = Manifest.read(source).label_vectors is not None
        origin = options.origin or ("vectors" if has_vectors else "hierarchy")
        return f"the {'label vectors' if origin == 'vectors' else origin} of shards"
    if source.suffix in (".csv", ".tsv") or (source / "data.noun").is_file():
        return "a hierarchy"
    if not source.is_file():
        problem = "is neither shards nor a WordNet dict" if source.is_dir() else "does not exist"
        raise FileNotFoundError(f"{source} {problem}: pass shards, vectors or a hierarchy")
    return "label vectors"


def _is_shards(folder: Path) -> bool:
    return (folder / "manifest.json").is_file()


def _hierarchy(source: Path, options: TreeOptions) -> "NamedTree":
    from data.shards.hierarchy import class_paths
    from data.shards.manifest import Manifest
    from heads.tree import NamedTree, label_tree_of_paths, read_parent_table, read_wordnet

    collapse = not options.keep_chains
    if _is_shards(source):
        manifest = Manifest.read(source)
        tree, pseudoclasses = label_tree_of_paths(*class_paths(source, manifest), collapse=collapse)
        return NamedTree(tree, tuple(manifest.class_names), pseudoclasses)
    names = None if options.classes is None else _class_list(options.classes)[0]
    if source.is_dir():
        return read_wordnet(source).tree(_required(names, source), collapse=collapse)
    hierarchy = read_parent_table(source)
    if several := hierarchy.num_with_several_parents():
        note = f"note: {several:,} names in {source} have several parents; using the first one"
        print(printable(note), file=sys.stderr)
    return hierarchy.tree(names or hierarchy.leaves(), collapse=collapse)


def _cover_tree(source: Path, options: TreeOptions) -> "NamedTree":
    from heads.tree import NamedTree, build_cover_tree, project

    names, vectors = _vectors(source, options)
    if options.project is not None:
        vectors = project(vectors, options.project)
    with progress("building the tree", "classes") as report:
        cover = build_cover_tree(vectors, base=options.base, report=report)
    return NamedTree.of_cover_tree(cover, names, options.kind)


def _vectors(source: Path, options: TreeOptions) -> "tuple[Sequence[str], np.ndarray]":
    from data.shards.label_vectors import load_label_vectors as load_of_shards
    from data.shards.manifest import Manifest
    from heads.tree import load_label_vectors, read_label_vectors

    if _is_shards(source):
        manifest = Manifest.read(source)
        return manifest.class_names, load_of_shards(source, manifest)
    if options.classes is None:
        found, vectors = read_label_vectors(source)
        return _required(found, source), vectors
    names, words = _class_list(options.classes)
    vectors, without = load_label_vectors(source, words, missing=options.missing)
    if without:
        shown = ", ".join(without[:10]) + (", …" if len(without) > 10 else "")
        filler = "the mean vector" if options.missing == "mean" else "zeros"
        what = f"{len(without):,} class names have no vector in {source}; using {filler} instead"
        print(printable(f"warning: {what}: {shown}"), file=sys.stderr)
    return names, vectors


def _class_list(path: Path) -> tuple[list[str], list[str]]:
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


def _required(names: list[str] | None, source: Path) -> list[str]:
    if names is None:
        raise ValueError(f"{source} contains no class names: pass them with --classes")
    return names


app.callback()(lambda: None)  # otherwise `kway tree` would be the command itself
app.command("build")(with_options(build_tree, options_of(TreeOptions)))
