"""Shards behind a URL: fetched once a machine, checked, and kept in a bounded cache."""
