"""Watches: standing queries that are evaluated on every frame of the feeds they select."""
