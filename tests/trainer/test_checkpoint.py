"""Checkpoints: resharded exactly, refused when altered, absent when not committed."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from data import Manifest
from tests.ranks import rank_world, run_on_ranks
from tests.shards import glyph_recipe
from tests.trainer.test_task import pictures
from trainer.checkpoint import (
    find_checkpoint,
    load_tensors,
    open_checkpoint,
    restore_random_state,
    save_checkpoint,
)
from trainer.optimizer import build_optimizer
from trainer.task import Task, build_task
from trainer.trained import label_vectors_of

NUM_CLASSES = 13


def task_and_optimizer(
    shards: Path, weights: str, optimizer: str
) -> tuple[Task, torch.optim.Optimizer]:
    recipe = glyph_recipe(
        shards,
        Path("unused"),
        head__weights__kind=weights,
        optimizer={"kind": optimizer, "lr": 0.01},
        train__global_batch=12,
    )
    manifest = Manifest.load(shards)
    task = build_task(
        recipe,
        class_names=manifest.class_names,
        label_vectors=label_vectors_of(recipe, manifest),
        world=rank_world(),
    )
    return task.train(), build_optimizer(recipe.optimizer, task)


def save_after_two_steps(shards: Path, root: Path, weights: str, optimizer: str):
    task, optim = task_and_optimizer(shards, weights, optimizer)
    world = task.world
    for _ in range(2):
        optim.zero_grad()
        task.backward(
            pictures(12 * world.rank // world.size, 12 * (world.rank + 1) // world.size), step=1
        )
        optim.step()
    torch.manual_seed(100 + world.rank)
    save_checkpoint(root, task.checkpoint_entries(optim), {"step": 2}, world, keep=2)
    return contents(task, optim), torch.rand(3).numpy()


def load(shards: Path, root: Path, weights: str, optimizer: str):
    task, optim = task_and_optimizer(shards, weights, optimizer)
    checkpoint, refused = find_checkpoint(root, task.world)
    assert checkpoint is not None
    assert refused == []
    task.create_optimizer_state(optim)
    load_tensors(checkpoint, task.checkpoint_entries(optim), task.world)
    restore_random_state(checkpoint, task.world, seed=0)
    return contents(task, optim), torch.rand(3).numpy()


def contents(task: Task, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Every tensor of this rank by name; head tensors are this rank's rows."""
    found = {name: tensor.detach().numpy() for name, tensor in task.state_dict().items()}
    for name, parameter in task.named_parameters():
        for key, value in optimizer.state[parameter].items():
            if value is not None:
                found[f"{name}.{key}"] = np.array(value)
    return found


def whole(ranks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Head rows joined over ranks, all else from rank 0."""
    return {
        name: np.concatenate([rank[name] for rank in ranks])
        if name.startswith("head.") and value.ndim
        else value
        for name, value in ranks[0].items()
    }


@pytest.mark.parametrize(
    ("saved_on", "loaded_on", "weights", "optimizer"),
    [
        (1, 3, "dense", "sgd"),
        (4, 1, "vtree", "adamw"),
        (4, 2, "utree", "adamw"),
        (4, 3, "vtree", "sgd"),
        (3, 2, "dense", "adamw"),
        (2, 2, "utree", "adamw"),
    ],
)
def test_a_checkpoint_loads_on_another_world_size_bit_for_bit(
    saved_on, loaded_on, weights, optimizer, glyphs, tmp_path
):
    arguments = (glyphs, tmp_path, weights, optimizer)
    saved = run_on_ranks(saved_on, save_after_two_steps, *arguments)
    loaded = run_on_ranks(loaded_on, load, *arguments)
    want, got = (whole([tensors for tensors, _ in ranks]) for ranks in (saved, loaded))
    assert want.keys() == got.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
    if saved_on == loaded_on:
        for (_, drawn), (_, drawn_again) in zip(saved, loaded, strict=True):
            np.testing.assert_array_equal(drawn, drawn_again)


def save_plain(root: Path, step: int, **state: int) -> Path:
    entries = {"weight": torch.full((3, 2), float(step))}
    return save_checkpoint(root, entries, {"step": step, **state}, rank_world(), keep=2)


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3):
        save_plain(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_refused_checkpoint_does_not_push_sound_ones_out(tmp_path):
    save_plain(tmp_path, 5)
    flip_a_bit(save_plain(tmp_path, 10))
    (tmp_path / "step-zzz").mkdir()
    for step in (6, 8):
        save_plain(tmp_path, step)
    found, refused = find_checkpoint(tmp_path, rank_world())
    assert found is not None
    assert found.step == 8
    assert len(refused) == 1


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path):
    names = {path.suffix for path in save_plain(tmp_path, 1).iterdir()}
    assert names == {".json", ".safetensors"}


def flip_a_bit(folder: Path) -> str:
    path = next(folder.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return f"{path.name} is not what was written"


def cut(folder: Path) -> str:
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    return f"{path.name} is not what was written"


def remove_a_file(folder: Path) -> str:
    (folder / "state.json").unlink()
    return r"state\.json is missing"


def add_a_file(folder: Path) -> str:
    (folder / "other.safetensors").write_bytes(b"x")
    return r"other\.safetensors does not belong there"


def edit_the_state(folder: Path) -> str:
    path = folder / "state.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    return r"state\.json is not what was written"


def remove_the_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return r"manifest\.json is missing"


def damage_the_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text("{")
    return r"manifest\.json is unreadable"


def strange_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text('{"format_version": "x", "files": {}}')
    return r"manifest\.json is unreadable"


def newer_format(folder: Path) -> str:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 99}))
    return "newer format"


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        cut,
        remove_a_file,
        add_a_file,
        edit_the_state,
        remove_the_manifest,
        damage_the_manifest,
        newer_format,
        strange_manifest,
    ],
)
def test_an_altered_checkpoint_is_refused_by_name_and_the_one_before_it_is_taken(damage, tmp_path):
    save_plain(tmp_path, 1)
    folder = save_plain(tmp_path, 2)
    message = damage(folder)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(folder)
    found, refused = find_checkpoint(tmp_path, rank_world())
    assert found is not None
    assert found.step == 1
    assert len(refused) == 1
    assert str(folder) in refused[0]


def test_a_folder_that_was_not_committed_does_not_exist(tmp_path):
    folder = save_plain(tmp_path, 1)
    shutil.move(folder, tmp_path / "step-00000001.partial")
    assert find_checkpoint(tmp_path, rank_world()) == (None, [])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"weight": torch.zeros(4, 2)},
            r"weight has shape \[4, 2\] in this run and shape \[3, 2\]",
        ),
        ({"other": torch.zeros(3, 2)}, r"other has shape \[3, 2\] in this run and no such tensor"),
    ],
)
def test_tensors_that_do_not_fit_are_named(entries, message, tmp_path):
    checkpoint = open_checkpoint(save_plain(tmp_path, 1))
    with pytest.raises(ValueError, match=message):
        load_tensors(checkpoint, entries, rank_world())
