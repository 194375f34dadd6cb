"""Emulates the volumes of pods (claims, ConfigMaps, Secrets and emptyDirs) as folders.

Not emulated: sizes of volumes on disk, storage classes, updates of mounted ConfigMaps.
"""

import base64
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.kubernetes.objects import quantity

Command = tuple[str, ...]


@dataclass(frozen=True)
class Volume:
    """A folder on this machine. `prepared` contains commands to run first, in the pod's mount
    namespace."""

    folder: Path
    read_only: bool = False
    prepared: tuple[Command, ...] = ()


@dataclass(frozen=True)
class Storage:
    """The manifests of a namespace, and the folder of its claims."""

    folder: Path
    manifests: Sequence[dict[str, Any]]

    def claim(self, name: str) -> Path:
        """Return the claim's folder, created on first use. Raises KeyError for an unknown claim."""
        self.found("PersistentVolumeClaim", name)
        folder = self.folder / "claims" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def found(self, kind: str, name: str) -> dict[str, Any]:
        for manifest in self.manifests:
            if (manifest["kind"], manifest["metadata"]["name"]) == (kind, name):
                return manifest
        raise KeyError(f"there is no {kind} {name}: apply it first")

    def volume(self, given: dict[str, Any], pod: Path, group: int | None) -> Volume:
        """Return a volume of a pod. `pod` is the pod's folder and `group` its fsGroup."""
        (source,) = given.keys() - {"name"}
        about, folder = given[source], pod / "volumes" / given["name"]
        match source:
            case "persistentVolumeClaim":
                read_only = about.get("readOnly", False)
                folder = self.claim(about["claimName"])
                if not read_only:
                    set_group(folder, group)
                return Volume(folder, read_only)
            case "emptyDir":
                return _empty(about, folder, group)
            case "configMap" | "secret":
                self._write_files(source, about, folder, group)
                return Volume(folder, read_only=True)
        raise ValueError(f"volume {given['name']}: {source} is not emulated")

    def _write_files(
        self, source: str, about: dict[str, Any], folder: Path, group: int | None
    ) -> None:
        folder.mkdir(parents=True)
        kind, key = ("ConfigMap", "name") if source == "configMap" else ("Secret", "secretName")
        try:
            manifest = self.found(kind, about[key])
        except KeyError:
            if not about.get("optional", False):
                raise
            return
        for name, content in _files(manifest).items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(about.get("defaultMode", 0o644))
            os.chown(folder / name, 0, group or 0)


def set_group(folder: Path, group: int | None) -> None:
    """Set the group of all files as the kubelet does for fsGroup, unless `folder` already has
    it."""
    if group is None or (folder.stat().st_gid == group and folder.stat().st_mode & stat.S_ISGID):
        return
    for path in (folder, *folder.rglob("*")):
        more = 0o2070 if path.is_dir() else 0o060
        os.chown(path, -1, group, follow_symlinks=False)
        path.chmod(path.stat().st_mode | more)


def _empty(about: dict[str, Any], folder: Path, group: int | None) -> Volume:
    folder.mkdir(parents=True)
    if about.get("medium") != "Memory":
        folder.chmod(0o777)
        set_group(folder, group)
        return Volume(folder)
    size = int(quantity(about.get("sizeLimit", "64Mi")))
    options = f"mode=2777,gid={group or 0},size={size},nosuid,nodev"
    return Volume(folder, prepared=(("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)),))


def _files(manifest: dict[str, Any]) -> dict[str, bytes]:
    """Return the content by key. The `data` of a Secret is base64."""
    plain = {k: v.encode() for k, v in manifest.get("stringData", {}).items()}
    data = manifest.get("data", {})
    if manifest["kind"] == "Secret":
        return {k: base64.b64decode(v) for k, v in data.items()} | plain
    return {k: v.encode() for k, v in data.items()}
