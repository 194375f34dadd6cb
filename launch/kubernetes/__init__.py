"""Renders manifests from k8s/ with kustomize."""
