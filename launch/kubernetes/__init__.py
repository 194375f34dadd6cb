"""Renders manifests from k8s/ with kustomize, and checks them beyond their schemas."""

from launch.kubernetes.checks import problems

__all__ = ["problems"]
