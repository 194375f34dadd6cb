"""`kway tree`: label trees from vectors, shards, encoders or hierarchies; and a look at one."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from launch.commands.given import given_options
from launch.commands.place import written_to
from launch.commands.tree_source import TreeOptions, build_named_tree, read_class_list
from launch.wording import printable, seconds_since

if TYPE_CHECKING:
    from heads.tree.named_tree import NamedTree

app = typer.Typer(help="Build a label tree, or show one.", no_args_is_help=True)

_TRIVIAL_PROJECTION = 16


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
    with written_to(out, "--out"):
        named.save(out)
    print(f"made of {'label vectors' if made_of == 'vectors' else 'the hierarchy'}")
    _print_statistics(named, projected=project is not None or made_of == "hierarchy")
    print(printable(f"{out}: {seconds_since(started)}"))


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
    title = f"{tree.name}: {len(named.classes):,} classes"
    with written_to(path, "--picture"):
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
