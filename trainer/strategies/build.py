"""The strategy that a recipe names."""

from trainer.backbone import Backbone
from trainer.config import Recipe
from trainer.strategies.base import Strategy
from trainer.world import World


def build_strategy(recipe: Recipe, backbone: Backbone, world: World) -> Strategy:
    """Spread `backbone`, which is on its device, over the ranks; one process has nothing to spread.

    Each is imported when it is asked for: DeepSpeed takes seconds.
    """
    config = recipe.train.strategy
    if world.size == 1:
        return Strategy(backbone)
    match config.kind:
        case "ddp":
            from trainer.strategies.ddp import DDP

            return DDP(backbone)
        case "fsdp":
            from trainer.strategies.fsdp import FSDP

            return FSDP(backbone, config, world)
        case "deepspeed":
            from trainer.strategies.deepspeed import DeepSpeed

            return DeepSpeed(backbone, config, world)
