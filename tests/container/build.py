"""Builds the images of a Dockerfile, a layer for each instruction that writes files."""

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
from tests.container.layers import Image, Mount, Place, megabytes, run

_MIRROR = "http://deb.debian.org/debian"
_SOURCES = """\
deb {mirror} {suite} main
deb {mirror} {suite}-updates main
deb {mirror}-security {suite}-security main
"""
# What sets Debian's slim image apart from debootstrap's: no documentation, nothing kept by apt.
_NOT_IN_SLIM = ("doc", "man", "info", "locale", "groff", "lintian", "linda")
_CLEAN = 'APT::Keep-Downloaded-Packages "false";\nDir::Cache::pkgcache "";\n'


@dataclass(frozen=True)
class Surroundings:
    """What RUN finds beside the image: mirrors and certificates, which stay out of it."""

    environment: Mapping[str, str]
    mounts: tuple[Mount, ...]


@dataclass
class Builder:
    dockerfile: Dockerfile
    context: Context
    surroundings: Surroundings
    work: Path

    def build(self, target: str) -> Image:
        """The image of a stage, made with all that it needs, and kept in `work` by its name."""
        for name in self.dockerfile.needed_for(target):
            if not self._kept(name).exists():
                print(f"\n== {name}", flush=True)
                self._build_stage(self.dockerfile.stages[name])
        return self.image(target)

    def image(self, name: str) -> Image:
        """One that was built before; FileNotFoundError where it was not."""
        kept: dict[str, Any] = json.loads(self._kept(name).read_text(encoding="utf-8"))
        for key in ("entrypoint", "command", "health"):
            kept[key] = tuple(kept[key])
        return Image(tuple(Path(layer) for layer in kept.pop("layers")), **kept)

    def _kept(self, name: str) -> Path:
        return self.work / "images" / f"{name}.json"

    def _build_stage(self, stage: Stage) -> None:
        known = stage.base in self.dockerfile.stages
        image = self.image(stage.base) if known else debian(stage.base, self.work)
        arguments: dict[str, str] = {}
        for step in stage.instructions:
            print(f"-- {step.name} {step.text[:100]}", flush=True)
            if step.name == "ARG":
                name = step.words[0].split("=")[0]
                own = expand(step.settings.get(name, ""), image.environment)
                arguments[name] = self.dockerfile.arguments.get(name, own)
            else:
                image = self._done(step, image, arguments)
        kept = self._kept(stage.name)
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(asdict(image), default=str, indent=2), encoding="utf-8")

    def _done(self, step: Instruction, image: Image, arguments: Mapping[str, str]) -> Image:
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
                image = self._with_layer(image, ["mkdir", "-p", folder], ())
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
            case _:  # EXPOSE says something and does nothing
                return image

    def _with_run(self, step: Instruction, image: Image, variables: Mapping[str, str]) -> Image:
        seen = {**variables, **self.surroundings.environment}
        as_seen = replace(image, environment=seen)
        # debootstrap leaves this machine's own in the root; an engine gives today's.
        mounts = (Mount(Path("/etc/resolv.conf"), "/etc/resolv.conf"), *self.surroundings.mounts)
        made = self._with_layer(as_seen, step.command, mounts, image.user)
        return replace(image, layers=made.layers)

    def _with_copy(self, step: Instruction, image: Image, variables: Mapping[str, str]) -> Image:
        *sources, target = [expand(word, variables) for word in step.words]
        whole_folder = target.endswith(("/", ".")) or len(sources) > 1
        target = str(Path(image.folder) / target)
        taken = self.work / "taken"
        shutil.rmtree(taken, ignore_errors=True)
        if "from" in step.flags:
            self._take_from(self.image(step.flags["from"]), sources[0], taken)
        else:
            for path in (path for source in sources for path in self.context.files(source)):
                (taken / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.context.root / path, taken / path)
            assert whole_folder, f"line {step.line}: COPY of the context goes into a folder here"
        copy = f"mkdir -p {target} && cp --recursive --no-dereference \
            --preserve=mode,timestamps,links /taken/. {target}/"
        made = self._with_layer(image, ["sh", "-ec", copy], (Mount(taken, "/taken"),), "0:0")
        shutil.rmtree(taken)
        return made

    def _take_from(self, source: Image, folder: str, taken: Path) -> None:
        taken.mkdir()
        place = Place(source.layers, self._scratch(), (Mount(taken, "/taken", read_only=False),))
        run(place, ["cp", "--archive", f"{folder}/.", "/taken/"], Image((), folder="/"))

    def _scratch(self) -> Path:
        shutil.rmtree(self.work / "scratch", ignore_errors=True)
        return self.work / "scratch" / "upper"

    def _with_layer(
        self, image: Image, words: list[str], mounts: tuple[Mount, ...], user: str = "0:0"
    ) -> Image:
        (self.work / "layers").mkdir(exist_ok=True)
        layer = self.work / "layers" / f"{len(list((self.work / 'layers').iterdir())):02}"
        layer.mkdir()
        place = Place(image.layers, layer / "upper", mounts)
        run(place, words, replace(image, user=user, folder=image.folder))
        return replace(image, layers=(*image.layers, layer / "upper"))


def debian(name: str, work: Path) -> Image:
    """The base image, made by debootstrap; ValueError for one that is not Debian's."""
    if not (found := re.fullmatch(r"debian:([a-z]+)(-\d{8})?-slim", name)):
        raise ValueError(f"FROM {name}: only debian:SUITE-slim can be made here")
    suite, root = found[1], work / "layers" / f"debian-{found[1]}"
    if not root.exists():
        made = ["debootstrap", "--variant=minbase", suite, root, _MIRROR]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
        _slim(root, suite)
        print(f"-- {name}: {megabytes(root):,.0f} MB by debootstrap", flush=True)
    return Image((root,))


def _slim(root: Path, suite: str) -> None:
    for folder in _NOT_IN_SLIM:
        shutil.rmtree(root / "usr/share" / folder, ignore_errors=True)
    for folder in ("var/lib/apt/lists", "var/cache/apt"):
        shutil.rmtree(root / folder)
        (root / folder).mkdir()
    excluded = "".join(f"path-exclude /usr/share/{folder}/*\n" for folder in _NOT_IN_SLIM)
    sources = _SOURCES.format(mirror=_MIRROR, suite=suite)
    (root / "etc/dpkg/dpkg.cfg.d/docker").write_text(excluded, encoding="utf-8")
    (root / "etc/apt/apt.conf.d/docker-clean").write_text(_CLEAN, encoding="utf-8")
    (root / "etc/apt/sources.list").write_text(sources, encoding="utf-8")
