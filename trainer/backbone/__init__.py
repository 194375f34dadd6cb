"""The backbone: a model that computes features from the inputs of a batch."""
