"""Galleries: precomputed features of a collection. Searching a gallery for a class is a
matrix-vector product."""
