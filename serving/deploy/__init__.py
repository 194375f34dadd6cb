"""Deployment: Ray Serve with its replicas and HAProxy, isolation on this machine, and clean-up."""
