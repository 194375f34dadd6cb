"""The folder of a run, its provenance, its state during training, and resuming."""
