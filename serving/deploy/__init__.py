"""Deployment: run Ray Serve and HAProxy, isolate them on this machine, and clean up after them."""
