"""Draw the figures of docs/: `python -m docs.figures [NAME ...] [--out DIR]`.

The files are reproducible byte for byte: random numbers are seeded and one thread is used.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure

from docs.figures import (
    architecture,
    augmentations,
    cover_tree,
    engine,
    losses,
    quadratic,
    row_types,
    sampling,
    scores,
    separation,
    single_logit,
    smooth_topk,
    tree_weights,
)
from docs.figures.look import look, save

FIGURES: dict[str, Callable[[], Figure]] = {
    "engine": engine.draw,
    "tree-weights": tree_weights.draw,
    "separation": separation.draw,
    "losses": losses.draw,
    "smooth-topk": smooth_topk.draw,
    "scores": scores.draw,
    "quadratic": quadratic.draw,
    "sampling": sampling.draw,
    "row-types": row_types.draw,
    "cover-tree": cover_tree.draw,
    "slc": single_logit.draw,
}
OF_DATA: dict[str, Callable[[], Figure]] = {"augmentations": augmentations.draw}
OF_README: dict[str, Callable[[], Figure]] = {"architecture": architecture.draw}
_ALL = {
    name: (f"{page}-{name}.png", draw)
    for page, figures in (("heads", FIGURES), ("data", OF_DATA), ("kway", OF_README))
    for name, draw in figures.items()
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.figures", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"figures to draw: {', '.join(_ALL)}; default: all"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parents[1],
        help="existing output folder; default: docs",
    )
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in _ALL]
    if unknown:
        parser.exit(2, f"error: unknown figure {unknown[0]!r}: choose from {', '.join(_ALL)}\n")
    if not arguments.out.is_dir():
        parser.exit(2, f"error: --out {arguments.out} is not a folder: create it first\n")
    torch.set_num_threads(1)
    names = arguments.names or list(_ALL)
    with look():
        for number, name in enumerate(names, 1):
            start = time.perf_counter()
            file, draw = _ALL[name]
            path = arguments.out / file
            save(draw(), path)
            seconds, size = time.perf_counter() - start, path.stat().st_size / 1000
            print(f"[{number}/{len(names)}] {path}  {size:.0f} kB  {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
