"""Inspection of shards."""
