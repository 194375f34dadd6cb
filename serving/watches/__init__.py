"""Watches: stored queries that are evaluated on every frame of the feeds that they select."""
