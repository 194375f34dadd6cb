"""Triton kernels that compute a head's logits in tiles, without writing them to memory."""
