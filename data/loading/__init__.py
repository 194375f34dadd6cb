"""The path from shards to batches.

A training sample passes through eight files. `loader.py` requests this rank's share of a global
batch, and `reader.py` reads it: `order.py` maps its positions to samples, `data/shards/split.py`
reads the bytes of the samples, and `inputs.py` converts them, for images with
`data/augment/training.py` and `data/images/decode.py`. The result is a `Batch` of `batch.py`.
"""
