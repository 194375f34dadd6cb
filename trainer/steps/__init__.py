"""The parts of a training step other than the model and the optimizer."""
