"""`kway losses`: lists the losses that a recipe can use."""

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from launch.terminal import wide_console

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from heads.losses import Loss


def losses() -> None:
    """List the losses, their papers, and which of them allow queries from a single logit."""
    from heads.losses import LOSSES

    table = Table(box=None, pad_edge=False)
    table.add_column("head.loss.kind", no_wrap=True)
    for column in ("paper", "aligned", "statistics of a row", "options"):
        table.add_column(column, overflow="fold")
    for kind, loss_class in LOSSES.items():
        loss = loss_class()
        aligned = "yes" if loss.aligned else "-"
        if loss.aligned_if:
            aligned = f"if {loss.aligned_if}"
        cells = kind, loss.paper, aligned, loss.statistic, _options(loss_class)
        table.add_row(*(Text(cell) for cell in cells))
    wide_console(1_000).print(table)
    print("aligned with the Principle of Logit Separation: a single logit is a meaningful score")


def _options(loss: type["Loss"]) -> str:
    """Format options as `name=default`, as in a recipe, with the meaning of a null default."""
    fields = loss.option_fields().items()
    return ", ".join(f"{name}={_default(field)}" for name, field in fields)


def _default(field: "FieldInfo") -> str:
    if field.default is not None:
        return str(field.default)
    _, _, meaning = (field.description or "").partition("default: ")
    return f"null ({meaning})"
