"""Folders of shards: the manifest, the offset index, splits as lists of samples, and the writer."""
