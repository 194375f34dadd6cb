"""Texts to token ids: tokenizers opened, and trained from shards."""
