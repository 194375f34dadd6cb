"""`kway losses`: lists the losses that a recipe can use."""

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from launch.terminal import wide_console

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


_WIDE_COLUMNS = 140  # minimum width of a terminal that shows the statistics, too
_LEGEND = (
    "aligned: with the Principle of Logit Separation, so a single logit is a meaningful score.",
    "label sets: supports rows with several labels or none.",
    "tiles: supports head.tiles, which computes the logits on a GPU without storing them.",
    "paper: docs/papers.md lists papers 000 to 004.",
)


def losses() -> None:
    """List the losses, their papers, and whether each is aligned and supports label sets and tiles.

    Aligned losses train logits that are meaningful scores for single-class queries.
    """
    from heads.losses import LOSSES

    table = Table(box=None, pad_edge=False)
    for column in ("head.loss.kind", "aligned", "label sets", "tiles"):
        table.add_column(column, no_wrap=True)
    for column in ("paper", "options", "statistics per row"):
        table.add_column(column, overflow="fold")
    conditions = []
    for kind, loss_class in LOSSES.items():
        loss = loss_class()
        aligned = "depends" if loss.aligned_if else "yes" if loss.aligned else "no"
        if loss.aligned_if:
            conditions.append(f"{kind} is aligned if {loss.aligned_if}.")
        sets = "no" if loss.label_sets == "no" else "yes"
        tiles = "no" if loss.tile is None else "yes"
        if loss.tile is None:
            conditions.append(f"{kind} does not support tiles, because {loss.without_tile}.")
        fields = loss_class.option_fields().items()
        options = ", ".join(f"{name}={_default(field)}" for name, field in fields)
        cells = (kind, aligned, sets, tiles, loss.paper, options, loss.statistic)
        table.add_row(*map(Text, cells))
    console = wide_console(1_000)
    if console.width < _WIDE_COLUMNS:
        del table.columns[-1]
    console.print(table)
    for line in ("", *_LEGEND, *conditions):
        console.print(Text(line))


def _default(field: "FieldInfo") -> str:
    """Format the default of an option as in a recipe, and explain null."""
    if field.default is not None:
        return str(field.default)
    _, _, meaning = (field.description or "").partition("default: ")
    return f"null ({meaning})"
