"""The backbone: a model that turns a batch's inputs into features."""
