"""Galleries: features of a collection, computed once; any class is then one product with them."""
