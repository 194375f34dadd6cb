"""Galleries: precomputed features of a collection. Searching one for a class is a matrix-vector
product."""
