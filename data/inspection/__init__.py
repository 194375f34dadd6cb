"""Inspection of shards: damage, characters that leak the label, counts and contact sheets."""
