"""Random changes of training pictures; each draw is a function of (seed, epoch, sample).

Mixing two of them is keyed by (seed, position of the pair in the stream).
"""

from data.augment.crop import random_box
from data.augment.draws import SampleDraws, pair_rng
from data.augment.mix import Mix, draw_mix, mixed
from data.augment.training import for_training

__all__ = ["Mix", "SampleDraws", "draw_mix", "for_training", "mixed", "pair_rng", "random_box"]
