"""Optimizers: their options in a recipe and the torch optimizer that they build.

`Optimizer` is the registry of the classes that a recipe can select with `optimizer.kind`.
"""

from typing import Annotated

from pydantic import Discriminator, SerializeAsAny

from data.base_config import or_instance
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.base import (
    HeadOptions,
    OptimizerKind,
    build_head_optimizer,
    build_optimizer,
    create_moments_of,
    create_momentum,
    set_rate,
    tensors_of,
)
from trainer.optimizers.sgd import SGD

Optimizer = Annotated[
    SerializeAsAny[SGD | AdamW], Discriminator("kind"), or_instance(OptimizerKind)
]

__all__ = [
    "SGD",
    "AdamW",
    "HeadOptions",
    "Optimizer",
    "OptimizerKind",
    "build_head_optimizer",
    "build_optimizer",
    "create_moments_of",
    "create_momentum",
    "set_rate",
    "tensors_of",
]
