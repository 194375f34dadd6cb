"""Writes shards: plans, output folders, claims, and the shards themselves."""
