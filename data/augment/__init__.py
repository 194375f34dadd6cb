"""Random augmentation of training images. Its random draws are keyed by (seed, epoch, sample).

The draws that mix two images are keyed by (seed, position of the pair in the stream).
"""
