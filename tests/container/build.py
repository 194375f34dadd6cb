"""Builds the images of a Dockerfile, with a layer for each instruction that writes files."""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.container.context import Context
from tests.container.dockerfile import Dockerfile, Instruction, Stage, expand
from tests.container.layers import Image, Mount, Sandbox, megabytes, run

_MIRROR = "http://deb.debian.org/debian"
_SOURCES = """\
deb {mirror} {suite} main
deb {mirror} {suite}-updates main
deb {mirror}-security {suite}-security main
"""
# Debian's slim image omits the documentation and apt caches that debootstrap installs.
_EXCLUDED = ("doc", "man", "info", "locale", "groff", "lintian", "linda")
_CLEAN = 'APT::Keep-Downloaded-Packages "false";\nDir::Cache::pkgcache "";\n'


@dataclass(frozen=True)
class BuildEnvironment:
    """Variables and mounts that RUN uses but the image does not keep, such as certificates."""

    environment: Mapping[str, str]
    mounts: tuple[Mount, ...]


@dataclass
class Builder:
    dockerfile: Dockerfile
    context: Context
    build_environment: BuildEnvironment
    work: Path

    def build(self, target: str) -> Image:
        """Build a stage and the stages it depends on. Each image is stored by name in `work`."""
        for name in self.dockerfile.stages_for(target):
            if not self._image_file(name).exists():
                print(f"\n== {name}", flush=True)
                self._build_stage(self.dockerfile.stages[name])
        return self.image(target)

    def image(self, name: str) -> Image:
        """Return a previously built image. Raises FileNotFoundError if there is none."""
        stored: dict[str, Any] = json.loads(self._image_file(name).read_text(encoding="utf-8"))
        for key in ("entrypoint", "command", "health"):
            stored[key] = tuple(stored[key])
        return Image(tuple(Path(layer) for layer in stored.pop("layers")), **stored)

    def _image_file(self, name: str) -> Path:
        return self.work / "images" / f"{name}.json"

    def _build_stage(self, stage: Stage) -> None:
        is_stage = stage.base in self.dockerfile.stages
        image = self.image(stage.base) if is_stage else debian(stage.base, self.work)
        arguments: dict[str, str] = {}
        for step in stage.instructions:
            print(f"-- {step.name} {step.text[:100]}", flush=True)
            if step.name == "ARG":
                name = step.words[0].split("=")[0]
                own = expand(step.settings.get(name, ""), image.environment)
                arguments[name] = self.dockerfile.arguments.get(name, own)
            else:
                image = self._apply(step, image, arguments)
        file = self._image_file(stage.name)
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(asdict(image), default=str, indent=2), encoding="utf-8")

    def _apply(self, step: Instruction, image: Image, arguments: Mapping[str, str]) -> Image:
        variables = {**arguments, **image.environment}
        match step.name:
            case "RUN":
                return self._with_run(step, image, variables)
            case "COPY":
                return self._with_copy(step, image, variables)
            case "ENV":
                new = {name: expand(value, variables) for name, value in step.settings.items()}
                return replace(image, environment={**image.environment, **new})
            case "WORKDIR":
                folder = expand(step.text, variables)
                image = self._add_layer(image, ["mkdir", "-p", folder], ())
                return replace(image, folder=folder)
            case "USER":
                return replace(image, user=expand(step.text, variables))
            case "ENTRYPOINT":
                return replace(image, entrypoint=tuple(step.command), command=())
            case "CMD":
                return replace(image, command=tuple(step.command))
            case "HEALTHCHECK":
                test = replace(step, text=step.text.removeprefix("CMD").strip())
                return replace(image, health=tuple(test.command))
            case _:  # EXPOSE has no effect
                return image

    def _with_run(self, step: Instruction, image: Image, variables: Mapping[str, str]) -> Image:
        environment = {**variables, **self.build_environment.environment}
        # As a container engine does, mount the host's current file over debootstrap's copy.
        resolver = Mount(Path("/etc/resolv.conf"), "/etc/resolv.conf")
        mounts = (resolver, *self.build_environment.mounts)
        started = replace(image, environment=environment)
        result = self._add_layer(started, step.command, mounts, image.user)
        return replace(image, layers=result.layers)

    def _with_copy(self, step: Instruction, image: Image, variables: Mapping[str, str]) -> Image:
        *sources, target = [expand(word, variables) for word in step.words]
        is_folder = target.endswith(("/", ".")) or len(sources) > 1
        target = str(Path(image.folder) / target)
        staging = self.work / "staging"
        shutil.rmtree(staging, ignore_errors=True)
        if "from" in step.flags:
            self._extract(self.image(step.flags["from"]), sources[0], staging)
        else:
            for path in (path for source in sources for path in self.context.files(source)):
                (staging / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.context.root / path, staging / path)
            assert is_folder, f"line {step.line}: COPY from the context must target a folder"
        copy = f"mkdir -p {target} && cp --recursive --no-dereference \
            --preserve=mode,timestamps,links /staging/. {target}/"
        result = self._add_layer(image, ["sh", "-ec", copy], (Mount(staging, "/staging"),), "0:0")
        shutil.rmtree(staging)
        return result

    def _extract(self, source: Image, folder: str, target: Path) -> None:
        target.mkdir()
        mounts = (Mount(target, "/staging", read_only=False),)
        sandbox = Sandbox(source.layers, self._scratch(), mounts)
        run(sandbox, ["cp", "--archive", f"{folder}/.", "/staging/"], Image((), folder="/"))

    def _scratch(self) -> Path:
        shutil.rmtree(self.work / "scratch", ignore_errors=True)
        return self.work / "scratch" / "upper"

    def _add_layer(
        self, image: Image, words: list[str], mounts: tuple[Mount, ...], user: str = "0:0"
    ) -> Image:
        (self.work / "layers").mkdir(exist_ok=True)
        layer = self.work / "layers" / f"{len(list((self.work / 'layers').iterdir())):02}"
        layer.mkdir()
        sandbox = Sandbox(image.layers, layer / "upper", mounts)
        run(sandbox, words, replace(image, user=user, folder=image.folder))
        return replace(image, layers=(*image.layers, layer / "upper"))


def debian(name: str, work: Path) -> Image:
    """Create the base image with debootstrap. Raises ValueError if it is not Debian slim."""
    if not (found := re.fullmatch(r"debian:([a-z]+)(-\d{8})?-slim", name)):
        raise ValueError(f"FROM {name}: only debian:SUITE-slim is supported")
    suite, root = found[1], work / "layers" / f"debian-{found[1]}"
    if not root.exists():
        command = ["debootstrap", "--variant=minbase", suite, root, _MIRROR]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
        _slim(root, suite)
        print(f"-- {name}: {megabytes(root):,.0f} MB by debootstrap", flush=True)
    return Image((root,))


def _slim(root: Path, suite: str) -> None:
    for folder in _EXCLUDED:
        shutil.rmtree(root / "usr/share" / folder, ignore_errors=True)
    for folder in ("var/lib/apt/lists", "var/cache/apt"):
        shutil.rmtree(root / folder)
        (root / folder).mkdir()
    excluded = "".join(f"path-exclude /usr/share/{folder}/*\n" for folder in _EXCLUDED)
    sources = _SOURCES.format(mirror=_MIRROR, suite=suite)
    (root / "etc/dpkg/dpkg.cfg.d/docker").write_text(excluded, encoding="utf-8")
    (root / "etc/apt/apt.conf.d/docker-clean").write_text(_CLEAN, encoding="utf-8")
    (root / "etc/apt/sources.list").write_text(sources, encoding="utf-8")
