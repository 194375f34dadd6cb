"""Galleries: features of a collection, computed once, so that searching a class is one product."""
