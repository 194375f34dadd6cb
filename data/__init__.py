"""Raw sources -> webdataset shards -> deterministic, resumable batches.

Import from the modules, as in `from data.shards.split import open_split`. This file does not import
anything, because `kway --help` and the client use modules of this package without torch.
"""
