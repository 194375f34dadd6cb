"""Serving: answer one-class queries of a bundle, in this process or over HTTP with Ray Serve."""
