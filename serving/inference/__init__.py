"""The Open Inference Protocol v2: one-class queries as tensors, over REST and gRPC."""
