"""The class-sharded engine: the loss of a head, computed in blocks of classes."""
