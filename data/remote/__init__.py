"""Shards behind a URL: fetched once per machine, verified, and kept in a bounded cache."""
