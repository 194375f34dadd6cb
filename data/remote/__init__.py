"""Shards at a URL, which are fetched once per machine, verified, and stored in a cache of bounded
size, and the input of sources at a URL.
"""
