"""The provenance of a checkpoint: the resolved recipe and the versions of the libraries and
imported components that compute a step, including the decoder of random crops.

A run that resumes from the checkpoint reports and records the differences.
"""

import json
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from data.images.jpeg_crop import decoder
from trainer.config import Recipe
from trainer.imports import import_paths, source_version
from trainer.run.folder import flat_settings

_LIBRARIES = (
    "kway",
    "deepspeed",
    "numpy",
    "opencv-python-headless",
    "pillow",
    "safetensors",
    "tokenizers",
    "transformers",
)


@dataclass(frozen=True)
class Change:
    """A setting or a version that differs from the one in the checkpoint."""

    key: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


def provenance(recipe: Recipe, *, evaluated_on: str | None = None) -> dict[str, Any]:
    """Return the keys `recipe` and `versions` of a checkpoint's JSON state.

    `evaluated_on` identifies the evaluations whose results `checkpoint.keep_best` compares.
    """
    paths = import_paths(recipe).values()
    sources = {path: source_version(path) for path in paths}
    versions = _versions() | sources
    if recipe.data.text is None:
        versions["jpeg_decoder"] = decoder()
    elif recipe.data.text.batches_by_length > 1:
        # Before, they crossed epochs. A run that resumes from such a checkpoint reads some texts of
        # its current epoch twice and others not at all.
        versions["windows_of_texts"] = "end with the epoch"
    if recipe.checkpoint.keep_best is not None and evaluated_on is not None:
        versions["evaluation"] = evaluated_on
    return {"recipe": recipe.model_dump(mode="json"), "versions": versions}


def changes_since(stored: dict[str, Any], current: dict[str, Any]) -> list[Change]:
    """Return the differences between the `current` provenance and the provenance `stored` in a
    checkpoint.

    The list is empty for checkpoints of earlier versions, which do not store the provenance.
    """
    if "recipe" not in stored:
        return []
    old, new = _flat(stored), _flat(current)
    return [
        Change(key, _shown(old, key), _shown(new, key))
        for key in sorted(old.keys() | new.keys())
        if key not in old or key not in new or old[key] != new[key]
    ]


def _flat(provenance: dict[str, Any]) -> dict[str, Any]:
    """Return the values by dotted key: `optimizer.lr`, …, `version.torch`, …"""
    versions = {"version": provenance["versions"]}
    return flat_settings(provenance["recipe"]) | flat_settings(versions)


def _shown(values: dict[str, Any], key: str) -> str:
    if key not in values:
        return "not set"
    value = values[key]
    return value if isinstance(value, str) else json.dumps(value)


def _versions() -> dict[str, str]:
    """Return the versions of Python, torch, its CUDA and cuDNN, and the installed `_LIBRARIES`."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda is not None:
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a source tree, or another package provides it
            continue
    return found
