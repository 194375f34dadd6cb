"""Ways in which the files of a saved checkpoint can be damaged."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

OLDER, NEWER = "step-00000001", "step-00000002"
Mutation = Callable[[Random, Path, Path], None]


def any_file(draw: Random, folder: Path) -> Path:
    return draw.choice(sorted(folder.iterdir()))


def tensor_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def truncate(draw: Random, folder: Path, _: Path) -> None:
    path = any_file(draw, folder)
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def remove_a_file(draw: Random, folder: Path, _: Path) -> None:
    any_file(draw, folder).unlink()


def replace_by_another_step(_: Random, folder: Path, older: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(older, folder)


def add_a_file(draw: Random, folder: Path, _: Path) -> None:
    name = draw.choice([".metadata", "__init__.py", "x.pt", "tensors-00009-of-00009.safetensors"])
    (folder / name).write_bytes(draw.randbytes(10))


def link_outside(draw: Random, folder: Path, _: Path) -> None:
    path = any_file(draw, folder)
    outside = folder.parent / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def replace_by_a_link(_: Random, folder: Path, __: Path) -> None:
    outside = folder.parent / "outside"
    folder.rename(outside)
    folder.symlink_to(outside)


def replace_by_a_file(_: Random, folder: Path, __: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"x")


def reseal(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and update its digest, as an attacker would."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["sha256"]
    change(content)
    compact = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    content["sha256"] = hashlib.sha256(compact).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def seal_file(folder: Path, name: str) -> None:
    """List a file in the manifest, with its current digest."""
    content = (folder / name).read_bytes()
    digest = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    reseal(folder, lambda manifest: manifest["files"].update({name: digest}))


def move_a_file_outside(draw: Random, folder: Path, _: Path) -> None:
    path = draw.choice(tensor_files(folder))
    path.rename(folder.parent / path.name)

    def point_outside(content: dict[str, Any]) -> None:
        content["files"][f"../{path.name}"] = content["files"].pop(path.name)

    reseal(folder, point_outside)


def claim_another_step(draw: Random, folder: Path, _: Path) -> None:
    reseal(folder, lambda content: content.update(step=draw.choice([1, 3, -2, 2.0, "2", None])))


def duplicate_key(_: Random, folder: Path, __: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 1,\n "step": 2'))


def huge_manifest(_: Random, folder: Path, __: Path) -> None:
    with (folder / "manifest.json").open("r+b") as file:
        file.truncate(10**12)  # a sparse file, which uses no space


def deep_state(_: Random, folder: Path, __: Path) -> None:
    (folder / "state.json").write_text('{"step": 2, "x": ' + "[" * 200_000)
    seal_file(folder, "state.json")


MUTATIONS: list[Mutation] = [
    truncate,
    remove_a_file,
    replace_by_another_step,
    add_a_file,
    link_outside,
    replace_by_a_link,
    replace_by_a_file,
    move_a_file_outside,
    claim_another_step,
    duplicate_key,
    huge_manifest,
    deep_state,
]
