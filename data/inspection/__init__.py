"""Inspection of shards: damage, counts and contact sheets."""
