"""Turns shards into batches: the global order, each rank's share and the training streams."""
