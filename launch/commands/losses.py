"""`kway losses`: the losses that a recipe may name."""

from rich.console import Console
from rich.table import Table


def losses() -> None:
    """List the losses: where they come from, and whether one logit alone can be trusted."""
    from heads import LOSSES

    table = Table("head.loss.kind", "paper", "logit separation", "statistics of a row")
    for kind, loss in LOSSES.items():
        table.add_row(kind, loss.paper, "aligned" if loss.aligned else "no", loss.statistic)
    Console().print(table)
