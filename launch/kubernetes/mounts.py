"""Where a container's files are: paths below its mounts, and which of them it may write."""

import posixpath
from collections.abc import Iterable
from pathlib import PurePosixPath

from launch.kubernetes.objects import Manifest, Pod, at

CLAIM = "persistentVolumeClaim"


def is_below(path: str, places: Iterable[str]) -> bool:
    """Whether the path is one of the places, or in it, once its `..` are followed."""
    followed = PurePosixPath(posixpath.normpath(path))
    return any(followed.is_relative_to(posixpath.normpath(place)) for place in places if place)


def kept(pod: Pod, container: Manifest, kinds: Iterable[str]) -> list[str]:
    """The folders where volumes of these kinds are mounted."""
    return [str(mount.get("mountPath")) for mount in _mounts(pod, container, kinds)]


def written(pod: Pod, container: Manifest, kinds: Iterable[str]) -> list[str]:
    """Those of them that neither the mount nor the volume makes read-only."""
    return [
        str(mount.get("mountPath"))
        for mount in _mounts(pod, container, kinds)
        if not mount.get("readOnly")
        and not at(pod.volumes.get(mount.get("name", ""), {}), CLAIM).get("readOnly")
    ]


def _mounts(pod: Pod, container: Manifest, kinds: Iterable[str]) -> list[Manifest]:
    kinds = set(kinds)
    return [
        mount
        for mount in container.get("volumeMounts", ())
        if kinds & pod.volumes.get(mount.get("name", ""), {}).keys()
    ]
