"""A look into shards: damage, what gives a label away, counts and contact sheets."""
