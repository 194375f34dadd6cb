"""Renders manifests from k8s/ with kustomize, and finds errors that schemas do not catch."""

from launch.kubernetes.checks import problems

__all__ = ["problems"]
