"""Recipe -> world -> backbone + head -> steps -> checkpoints -> evaluation -> bundle."""
