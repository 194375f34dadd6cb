"""Serving: answer one-class queries with the model in a bundle, in-process or over HTTP with Ray
Serve."""
