"""How the backbone is spread over the ranks: `ddp`, `fsdp` or `deepspeed`, as one interface."""

from trainer.strategies.base import Strategy
from trainer.strategies.build import build_strategy

__all__ = ["Strategy", "build_strategy"]
