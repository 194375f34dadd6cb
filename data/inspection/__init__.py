"""Inspection of shards: damage, counts and examples."""
