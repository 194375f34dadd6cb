"""Random changes of training images; each draw is a function of (seed, epoch, sample).

Mixing two of them is keyed by (seed, position of the pair in the stream).
"""

from data.augment.draws import SampleDraws, pair_rng
from data.augment.mix import Mix, MixDraw
from data.augment.training import AugmentConfig, SizeStage, for_training

__all__ = [
    "AugmentConfig",
    "Mix",
    "MixDraw",
    "SampleDraws",
    "SizeStage",
    "for_training",
    "pair_rng",
]
