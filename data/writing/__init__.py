"""Sources to shards: written by several processes, killed and gone on with, duplicates kept out."""
