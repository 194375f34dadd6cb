"""What a folder of shards is: manifest, offset index, and a split of it as a list of samples."""
