"""Training: recipe -> world -> backbone + head -> steps -> checkpoints -> evaluation -> bundle."""
