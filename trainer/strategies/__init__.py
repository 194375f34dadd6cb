"""Strategies for distributing the backbone over ranks.

`StrategyConfig` is the registry of the classes that a recipe can select with `train.strategy.kind`.
"""

from typing import Annotated

from pydantic import Field

from trainer.strategies.base import Strategy
from trainer.strategies.ddp import DDP
from trainer.strategies.deepspeed import DeepSpeed
from trainer.strategies.fsdp import FSDP

StrategyConfig = Annotated[DDP | FSDP | DeepSpeed, Field(discriminator="kind")]

__all__ = ["DDP", "FSDP", "DeepSpeed", "Strategy", "StrategyConfig"]
