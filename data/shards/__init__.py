"""Folders of shards: the manifest, offset indices, splits as lists of samples, and writing."""
