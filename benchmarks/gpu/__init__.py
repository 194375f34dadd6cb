"""Correctness, speed and memory of kway on one GPU, in parts that fit into short sessions."""
