"""`kway losses`: the losses that a recipe may name."""

from typing import get_args

from pydantic.fields import FieldInfo
from rich.console import Console
from rich.table import Table
from rich.text import Text

from heads.config import LossConfig


def losses() -> None:
    """List the losses: where they come from, and whether one logit alone can be trusted."""
    from heads.losses import LOSSES

    table = Table(box=None, pad_edge=False)
    table.add_column("head.loss.kind", no_wrap=True)
    for column in ("paper", "logits", "statistics of a row", "hyperparameters"):
        table.add_column(column, overflow="fold")
    for kind, loss in LOSSES.items():
        aligned = "aligned" if loss.aligned else "-"
        cells = kind, loss.paper, aligned, loss.statistic, _hyperparameters(kind)
        table.add_row(*(Text(cell) for cell in cells))
    Console().print(table)
    print("aligned: with the Principle of Logit Separation, one logit alone can be compared")


def _hyperparameters(kind: str) -> str:
    """`name=default` of each, as a recipe takes them, and what a default of null stands for."""
    (config,) = [config for config in get_args(get_args(LossConfig)[0]) if config().kind == kind]
    fields = config.model_fields.items()
    return ", ".join(f"{name}={_default(field)}" for name, field in fields if name != "kind")


def _default(field: FieldInfo) -> str:
    if field.default is not None:
        return str(field.default)
    _, _, meaning = (field.description or "").partition("default: ")
    return f"null ({meaning})"
