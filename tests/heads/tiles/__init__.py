"""Tests of the kernels in `heads/tiles`."""
