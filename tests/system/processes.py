"""Runs kway's commands as a user would, in separate processes that are stopped by process ID."""

import os
import subprocess
import sys
from pathlib import Path

from trainer.config import Recipe
from trainer.recipe import dump_recipe

ROOT = Path(__file__).parents[2]
KWAY = [sys.executable, "-m", "launch"]


def environment() -> dict[str, str]:
    """Return this process's environment without the variables that torchrun sets for a rank."""
    hidden = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**inherited, "OMP_NUM_THREADS": "1"}  # torchrun's default for several ranks


def run(
    command: list[str], *, timeout: float = 240, cwd: Path = ROOT
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env=environment(),
        check=False,
    )


def write_recipe(folder: Path, recipe: Recipe) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    return path
