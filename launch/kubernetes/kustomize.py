"""kway's kustomize files, and the program that builds them. No templates of our own."""

import shutil
import subprocess
from pathlib import Path

# Beside the packages, in a checkout and where kway is installed.
FOLDER = Path(__file__).parents[2] / "k8s"
OVERLAYS = FOLDER / "overlays"
_SECONDS = 60


def program() -> list[str]:
    """The command that builds a folder; FileNotFoundError where there is none."""
    if (path := shutil.which("kustomize")) is not None:
        return [path, "build"]
    if (path := shutil.which("kubectl")) is not None:
        return [path, "kustomize"]
    raise FileNotFoundError(
        "neither kubectl nor kustomize is on PATH: install kubectl 1.27 or newer "
        "(https://kubernetes.io/docs/tasks/tools), which brings both"
    )


def build(folder: Path) -> str:
    """The manifests of a kustomization's folder as YAML; ValueError with what kustomize says."""
    command = [*program(), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ValueError(f"kustomize refuses {folder.name}: {said}")
    return done.stdout
