"""The check of thresholds, on a tiny run."""
