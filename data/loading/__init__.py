"""The path from shards to batches: the global order, each rank's share and the training streams."""
