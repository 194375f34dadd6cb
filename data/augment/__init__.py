"""Random augmentation of training images; each draw is a function of (seed, epoch, sample).

Mixing two of them is keyed by (seed, position of the pair in the stream).
"""
