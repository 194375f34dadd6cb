"""Random augmentation of training images. Each draw is a function of (seed, epoch, sample).

The mixing of two images is keyed by (seed, position of the pair in the stream).
"""
