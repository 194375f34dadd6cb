"""What a run reports during training: metrics, progress and time by phase."""
