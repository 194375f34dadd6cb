"""Deployment: Ray Serve, its replicas and HAProxy, isolation on this machine, and clean-up."""
