"""Reports on a run during training: metrics, progress and time by phase."""
