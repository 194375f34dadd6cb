"""Turns classifiers that other libraries trained into bundles, without training."""
