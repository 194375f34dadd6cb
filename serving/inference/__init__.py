"""The Open Inference Protocol v2: one-class questions as tensors, over REST and gRPC."""
