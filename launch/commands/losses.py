"""`kway losses`: the losses that a recipe may name."""

from pydantic.fields import FieldInfo
from rich.console import Console
from rich.table import Table
from rich.text import Text

from heads.config import LossConfig, loss_config


def losses() -> None:
    """List the losses: where they come from, and whether one logit alone can be trusted."""
    from heads.losses import LOSSES, example_loss

    table = Table(box=None, pad_edge=False)
    table.add_column("head.loss.kind", no_wrap=True)
    for column in ("paper", "aligned", "statistics of a row", "hyperparameters"):
        table.add_column(column, overflow="fold")
    for kind in LOSSES:
        config = loss_config(kind)
        loss = example_loss(config)
        aligned = "yes" if loss.aligned else "-"
        if loss.aligned_if:
            aligned = f"if {loss.aligned_if}"
        cells = kind, loss.paper, aligned, loss.statistic, _hyperparameters(config)
        table.add_row(*(Text(cell) for cell in cells))
    Console().print(table)
    print("aligned: with the Principle of Logit Separation, one logit alone can be compared")


def _hyperparameters(config: LossConfig) -> str:
    """`name=default` of each, as a recipe takes them, and what a default of null stands for."""
    fields = type(config).model_fields.items()
    return ", ".join(f"{name}={_default(field)}" for name, field in fields if name != "kind")


def _default(field: FieldInfo) -> str:
    if field.default is not None:
        return str(field.default)
    _, _, meaning = (field.description or "").partition("default: ")
    return f"null ({meaning})"
