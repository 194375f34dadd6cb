"""Shards at a URL: fetched once per machine, verified, and stored in a bounded cache."""
