"""Draws figures of the results: head steps, and queries for one logit and for all logits."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt

Records = dict[str, dict[str, Any]]


def write_figures(folder: Path, records: Records) -> list[str]:
    """Write the figures for which there are results, and return their file names."""
    heads, servings = sized_results(records, "head-"), sized_results(records, "serving-")
    drawn = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, found, draw in (("heads", heads, _heads), ("serving", servings, _serving)):
        if found:
            figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
            draw(axes, found)
            figure.savefig(folder / f"{name}.png", dpi=150)
            plt.close(figure)
            drawn.append(f"{name}.png")
    return drawn


def sized_results(records: Records, prefix: str) -> list[dict[str, Any]]:
    """Return the results of slices with a number of classes, from small to large."""
    found = [r["result"] for name, r in records.items() if name.startswith(prefix) if "result" in r]
    sized = [result for result in found if "classes" in result]
    return sorted(sized, key=lambda result: (result["classes"], result.get("rows", 0)))


def _heads(axes: Any, heads: list[dict[str, Any]]) -> None:
    """Draw each contender's time relative to the bare products."""
    names = list(dict.fromkeys(name for head in heads for name in head["contenders"]))
    for name in names:
        points = [
            (f"{h['classes']:,}\nx {h['rows']:,}", h["contenders"][name]["seconds"] / _bare(h))
            for h in heads
            if "seconds" in h["contenders"].get(name, {})
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xlabel("classes x rows")
    axes.set_ylabel("time of a step / time of four bare products")
    axes.set_ylim(bottom=0)
    axes.legend()


def _bare(head: dict[str, Any]) -> float:
    return float(head["contenders"]["bare products"]["seconds"])


def _serving(axes: Any, servings: list[dict[str, Any]]) -> None:
    """Draw the time of a query's head for each number of classes."""
    for number, query in enumerate(servings[0]["queries"]):
        for name in ("one_logit", "one_row_of_a_file", "all_logits"):
            times = [1e6 * each["queries"][number][name]["seconds"] for each in servings]
            label = f"{name.replace('_', ' ')}, batch {query['rows']}"
            axes.plot([each["classes"] for each in servings], times, marker="o", label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("classes")
    axes.set_ylabel("time of the head (µs)")
    axes.legend()
