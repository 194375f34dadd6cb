"""Serving: a bundle answers one-class questions, in this process or over HTTP with Ray Serve."""
