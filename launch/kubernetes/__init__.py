"""Manifests for a cluster: rendered by kustomize from k8s/, and checked where schemas are blind."""

from launch.kubernetes.checks import problems

__all__ = ["problems"]
