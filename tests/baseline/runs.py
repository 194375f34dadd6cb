"""Checkpoints, evaluations and bundles of short runs, and the exit codes of commands."""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import yaml
from safetensors.torch import load_file

from tests.baseline.commands import kway, must
from tests.baseline.samples import write_table
from tests.baseline.values import Record, digest, exact, near, summary
from tests.shards import TINY_BERT, TINY_RESNET
from trainer.bundle.class_list import open_classes

# Float32 operations round differently on other processors, and training amplifies this.
_TOLERANCE = 1e-3
_CLASSES = 12
# The keys of a checkpoint's state.json that depend on the run and not on the machine.
_STATE = ("step", "cursor", "tree", "data", "evaluated", "skipped")

_IMAGES: dict[str, Any] = {
    "run": "images",
    "data": {
        "shards": "image-shards",
        "image": {"size": 16, "channels": 1, "mean": [0.5], "std": [0.25]},
        "augment": {"crop_area": [0.7, 1.0], "flip": 0},
    },
    "backbone": {"config": {**TINY_RESNET, "num_channels": 1}},
    "head": {
        "weights": {"kind": "vtree"},
        "logits": {"kind": "dot", "learn_scale": True},
        "loss": {"kind": "batch_ce"},
    },
    "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
    "train": {
        "duration": {"steps": 8},
        "global_batch": 24,
        "micro_batches": 2,
        "clip_norm": 1.0,
        "ema": {"decay": 0.9},
    },
    "checkpoint": {"every": {"steps": 4}, "keep_last": 2},
    "telemetry": {"log_every": 1, "sample_ids": True},
}
_TEXTS: dict[str, Any] = {
    "run": "texts",
    "data": {
        "shards": "text-shards",
        "text": {"tokenizer": "tokenizer", "max_length": 20, "batches_by_length": 1},
    },
    "backbone": {"config": {**TINY_BERT, "vocab_size": 150}, "pooling": "mean"},
    "head": {"loss": {"kind": "smooth_topk", "k": 2}, "dtype": "bf16"},
    "optimizer": {"kind": "adamw", "lr": 0.003},
    "train": {"duration": {"steps": 4}, "global_batch": 12},
    "telemetry": {"log_every": 1},
}


def record(folder: Path) -> Record:
    with chdir(folder):
        _write_inputs()
        found: Record = {}
        for name, ranks, recipe in (("images", 2, _IMAGES), ("texts", 1, _TEXTS)):
            Path(f"{name}.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
            _train(f"{name}.yaml", ranks)
            found |= _run(name)
            must("export", name, "-o", f"{name}-bundle")
            found |= _bundle(f"{name}-bundle")
        found |= _exit_codes()
        # Resume on another number of ranks.
        _train("images.yaml", 1, "train.duration.steps=10")
        return found | {f"resumed {key}": entry for key, entry in _run("images").items()}


def _write_inputs() -> None:
    rng = np.random.default_rng(0)
    for label in range(_CLASSES):
        folder = Path("files") / f"class {label}"
        folder.mkdir(parents=True)
        for number in range(10):
            image = rng.integers(0, 120, (16, 16, 3), dtype=np.uint8)
            image[:, label : label + 5] += 100
            cv2.imwrite(str(folder / f"{number}.png"), image)
    centers = rng.normal(size=(3, 6))
    vectors = centers[np.arange(_CLASSES) % 3] + 0.3 * rng.normal(size=(_CLASSES, 6))
    names = [f"class {label}" for label in range(_CLASSES)]
    np.savez("vectors.npz", vectors=vectors.astype(np.float32), names=names)
    packed = ("--original", "--test-fraction", 0.3, "--vectors", "vectors.npz", "--workers", 0)
    must("shard", "imagefolder", "files", "-o", "image-shards", *packed)
    write_table(Path("table.csv"))
    columns = ("--text", "text", "--label", "label", "--split", "split")
    must("shard", "table", "table.csv", "-o", "text-shards", *columns)
    must("tokenizer", "text-shards", "-o", "tokenizer", "--vocab-size", 150)


def _train(recipe: str, ranks: int, *overrides: str) -> None:
    command = ["train", recipe, "--nproc", str(ranks), "train.device=cpu", *overrides]
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "launch", *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"kway {' '.join(command)} exited with {ran.returncode}: {ran.stderr}")


def _run(name: str) -> Record:
    """Record the newest checkpoint, the logged losses and samples, and the evaluation of a run."""
    run = Path(name)
    checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir())
    state = json.loads((run / "checkpoints" / checkpoints[-1] / "state.json").read_text())
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    evaluation = json.loads((run / "evaluations" / f"{checkpoints[-1]}.json").read_text())
    samples = sorted(run.glob("samples-rank*.jsonl"))
    return {
        f"{name}/checkpoints": exact(checkpoints),
        f"{name}/state": exact({key: state[key] for key in _STATE}),
        f"{name}/losses": near(losses, _TOLERANCE),
        f"{name}/evaluation": near(evaluation, _TOLERANCE),
        f"{name}/samples": exact([digest(path) for path in samples]),
        **_tensors(run / "checkpoints" / checkpoints[-1], name),
        **_tensors(run / "evaluations", name, _of_all_classes),
    }


def _of_all_classes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of an evaluation with one row per class, as they were when the record was
    made. Later, classes without samples got no row of their own."""
    class_ids, row_of_class = tensors.pop("class_ids"), tensors.pop("row_of_class")
    for key in ("positives", "average_precision", "precision_at", "threshold", "correct"):
        absent = torch.nan if tensors[key].is_floating_point() else 0
        whole = tensors[key].new_full((len(row_of_class), *tensors[key].shape[1:]), absent)
        whole[class_ids] = tensors[key]
        tensors[key] = whole
    for key in ("thresholds", "kinds", "pass_rates"):
        tensors[key] = tensors[key][row_of_class]
    return {**tensors, "reached": tensors["reached"].long()}


def _tensors(
    folder: Path,
    name: str,
    convert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = dict,
) -> Record:
    """Record the shape, type and numbers of every tensor in a folder."""
    found: Record = {}
    for path in sorted(folder.rglob("*.safetensors")):
        for key, tensor in sorted(convert(load_file(path)).items()):
            # The gradient of a key's bias is 0 except for rounding errors, which differ between
            # processors and which Adam turns into steps.
            if key.endswith("self.key.bias"):
                continue
            entry: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype)}
            if tensor.is_floating_point():
                entry["numbers"] = summary(tensor.float().numpy())
            else:
                entry["digest"] = digest(tensor.numpy().tobytes())
            found[f"{name}/{path.name}/{key}"] = near(entry, _TOLERANCE)
    return found


def _bundle(name: str) -> Record:
    folder = Path(name)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    spec = json.loads((folder / "bundle.json").read_text())
    classes = open_classes(folder, spec["model"]["num_classes"], spec["files"])
    lines = [info.model_dump_json(exclude_defaults=True) + "\n" for info in classes]
    return {
        f"{name}/files": exact(files),
        f"{name}/bundle.json": near({**spec, "files": sorted(spec["files"])}, _TOLERANCE),
        # The lines of the class list of earlier bundles.
        f"{name}/classes.jsonl": exact(digest("".join(lines).encode())),
        **{f"{name}/{path}": exact(_encoder_file(folder / path)) for path in files if "/" in path},
        **_tensors(folder, name),
    }


def _encoder_file(path: Path) -> Any:
    """Return a file of the encoder's configuration, without the version that wrote it."""
    config = json.loads(path.read_bytes())
    return {key: value for key, value in config.items() if key != "transformers_version"}


def _exit_codes() -> Record:
    """Record the exit code of each command, and the number of lines that a mistake prints."""
    Path("typing-error.yaml").write_text("run: x\ndata: {shard: image-shards}\n")
    Path("broken.yaml").write_text("run: [\n")
    Path("empty").mkdir()
    Path("not-an-image.png").write_bytes(b"text")
    Path("classes.csv").write_text("class\n")
    image, tree = "files/class 3/1.png", ("tree", "build", "vectors.npz")
    commands: list[tuple[object, ...]] = [
        ("--help",),
        (),
        ("losses",),
        ("trian",),
        ("train", "none.yaml"),
        ("train", "broken.yaml"),
        ("train", "typing-error.yaml"),
        ("train", "images.yaml", "--fast"),
        ("train", "images.yaml", "optimizer.lr=fast"),
        ("train", "images.yaml", "--nproc", 0),
        ("train", "images.yaml", "--print-config"),
        ("eval", "images"),
        ("eval", "none"),
        ("eval", "images", "--checkpoint", 7),
        ("eval", "images", "--set", "evaluation.recalls=[2]"),
        ("export", "images", "-o", "images-bundle"),
        ("export", "images", "-o", "images-bundle", "--force"),
        ("export", "images", "-o", "x", "--recall", 1.5),
        ("query", "images-bundle", "--class", "class 3", image),
        ("query", "images-bundle", "--class", "class 3", "--recall", 0.9, "--json", image),
        ("query", "images-bundle", "--class", "class 99", image),
        ("query", "images-bundle", "--class", "class 3", "none.png"),
        ("query", "images-bundle", "--class", "class 3", "not-an-image.png"),
        ("query", "texts-bundle", "--class", "red", "--text", "a red fox"),
        ("query", "empty", "--class", "red", "--text", "a red fox"),
        ("calibrate", "images-bundle", "image-shards", "-o", "calibrated"),
        ("calibrate", "images-bundle", "text-shards", "-o", "x"),
        ("index", "images-bundle", "files", "-o", "gallery"),
        ("index", "images-bundle", "empty", "-o", "x"),
        ("shard", "imagefolder", "none", "-o", "x"),
        ("shard", "imagefolder", "empty", "-o", "x"),
        ("shard", "imagefolder", "files", "-o", "image-shards"),
        ("shard", "table", "classes.csv", "-o", "x", "--text", "text", "--label", "class"),
        ("shard", "show", "image-shards"),
        ("shard", "verify", "image-shards", "--decode"),
        ("shard", "verify", "empty"),
        (*tree, "-o", "tree.safetensors"),
        (*tree, "-o", "tree.safetensors", "--base", 0.5),
        ("tokenizer", "image-shards", "-o", "x"),
        ("report", "images", "-o", "report.html"),
        ("report", "none", "-o", "x.html"),
        ("plan", "images.yaml", "--classes", 1),
        ("serve", "none"),
        ("serve", "images-bundle", "--timeout", "nan"),
        ("serve", "images-bundle", "--host", "0.0.0.0"),
        ("k8s", "render", "training", "none.yaml"),
    ]
    found: Record = {}
    for command in commands:
        ran = kway(*command)
        entry = {"code": ran.code, "lines": len(ran.errors.splitlines()) if ran.code else 0}
        found[f"exit/{' '.join(map(str, command))}"] = exact(entry)
    return found
