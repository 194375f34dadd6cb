"""Random augmentation of training images. Its random draws are keyed by (seed, epoch, sample).

Draws for mixing two images are keyed by (seed, position of the pair in the stream).
"""
