"""Manifests for a cluster: rendered by kustomize from k8s/, and checked beyond their schemas."""

from launch.kubernetes.checks import problems

__all__ = ["problems"]
