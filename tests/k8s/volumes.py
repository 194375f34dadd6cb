"""What pods on this machine mount: claims, ConfigMaps and Secrets as folders, emptyDirs anew a pod.

Not emulated: sizes of volumes on disk, classes of storage, ConfigMaps that change under a pod.
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
    """A folder of this machine; `prepared` runs first, where only the pod sees what it mounts."""

    folder: Path
    read_only: bool = False
    prepared: tuple[Command, ...] = ()


@dataclass(frozen=True)
class Storage:
    """The manifests of a namespace, and the folder under which its claims are kept."""

    folder: Path
    manifests: Sequence[dict[str, Any]]

    def claim(self, name: str) -> Path:
        """The claim's folder, made when it is first asked for; KeyError for one nobody made."""
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
        """A volume of a pod whose own folder is `pod`; `group` is its fsGroup."""
        (source,) = given.keys() - {"name"}
        about, folder = given[source], pod / "volumes" / given["name"]
        match source:
            case "persistentVolumeClaim":
                read_only = about.get("readOnly", False)
                folder = self.claim(about["claimName"])
                if not read_only:
                    hand_over(folder, group)
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


def hand_over(folder: Path, group: int | None) -> None:
    """What the kubelet does for fsGroup: all of it is the group's, unless its root is already."""
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
        hand_over(folder, group)
        return Volume(folder)
    size = int(quantity(about.get("sizeLimit", "64Mi")))
    options = f"mode=2777,gid={group or 0},size={size},nosuid,nodev"
    return Volume(folder, prepared=(("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)),))


def _files(manifest: dict[str, Any]) -> dict[str, bytes]:
    """Content by key; `data` of a Secret is base64."""
    plain = {k: v.encode() for k, v in manifest.get("stringData", {}).items()}
    data = manifest.get("data", {})
    if manifest["kind"] == "Secret":
        return {k: base64.b64decode(v) for k, v in data.items()} | plain
    return {k: v.encode() for k, v in data.items()}
