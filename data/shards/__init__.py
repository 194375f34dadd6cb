"""Folders of shards: manifest, offset index, a split as a list of samples, and the writer."""
