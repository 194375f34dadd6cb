"""Galleries: precomputed features of a collection. Searching a gallery for a class takes one
matrix-vector product."""
