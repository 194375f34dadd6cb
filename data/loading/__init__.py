"""Shards to batches: the global order, its shares, and the streams that a trainer reads."""
