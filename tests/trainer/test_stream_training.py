"""Training on tar files without an index: evaluation, export, resuming and damaged samples."""

import json
from pathlib import Path
from typing import Any

import pytest
import webdataset

from data.shards.split import open_split
from launch.commands.evaluate import evaluate
from tests.ranks import rank_world, run_on_ranks
from tests.shards import glyph_recipe
from tests.trainer.training import train_on_ranks
from trainer.bundle.bundle import Bundle
from trainer.bundle.export import export_run
from trainer.config import Recipe
from trainer.evaluation import load_evaluation
from trainer.train import train


@pytest.fixture(scope="module")
def tars(glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training samples of `glyphs` and one invalid image in 4 tar files, part-0.tar to
    part-3.tar.
    """
    folder = tmp_path_factory.mktemp("tars")
    writers = [webdataset.TarWriter(str(folder / f"part-{number}.tar")) for number in range(4)]
    with open_split(glyphs, "train") as split:
        for i in range(len(split)):
            data, extension, label = split.read(i)
            writers[i % 4].write({"__key__": f"{i:04d}", extension: data, "cls": label})
    writers[0].write({"__key__": "damaged", "png": b"not an image", "cls": 0})
    for writer in writers:
        writer.close()
    return folder


def stream_recipe(glyphs: Path, tars: Path, run: Path, **changes: Any) -> Recipe:
    stream = {"shards": f"{tars}/part-{{0..3}}.tar", "samples": 268, "buffer": 300}
    return glyph_recipe(glyphs, run, data__stream=stream, **changes)


def saved_state(run: Path) -> dict[str, Any]:
    newest = max((run / "checkpoints").glob("step-*"))
    found: dict[str, Any] = json.loads((newest / "state.json").read_text())
    return found


def test_a_run_on_a_stream_is_evaluated_and_exported(
    glyphs: Path, tars: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = stream_recipe(
        glyphs,
        tars,
        tmp_path / "run",
        data__train_split="missing",
        optimizer={"kind": "adamw", "lr": 0.01},
        train={"duration": {"epochs": 4}, "global_batch": 16},
    )
    train(recipe, rank_world())
    step = 4 * 268 // 16
    measured = load_evaluation(recipe.run / "evaluations", step=step)
    # Chance level is 0.08. Order and augmentation depend on the paths of the tar files, which
    # differ in every test run, so the accuracy varies.
    assert measured.metrics["top1"] > 0.13
    assert caplog.text.count(f"skipped {tars}/part-0.tar: damaged: ") == 1
    for path in (recipe.run / "evaluations").iterdir():
        path.unlink()
    evaluate(recipe.run)
    assert load_evaluation(recipe.run / "evaluations", step=step).metrics == measured.metrics
    export_run(recipe.run, tmp_path / "bundle", rank_world())
    assert len(Bundle.open(tmp_path / "bundle").classes) == 13


def test_a_stream_states_what_is_not_guaranteed_and_can_be_resumed(
    glyphs: Path, tars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(stream_recipe(glyphs, tars, tmp_path / "run"), rank_world())
    printed = capsys.readouterr()
    output = printed.out + printed.err
    assert output.count("reading 4 tars as a stream without an index: webdataset draws") == 1
    assert "a resumed run draws a new random sequence" in output
    longer = stream_recipe(glyphs, tars, tmp_path / "run", train__duration={"steps": 6})
    train(longer, rank_world())
    assert saved_state(longer.run)["step"] == 6
    assert saved_state(longer.run)["cursor"]["samples"] == 72


def test_two_ranks_agree_on_the_skipped_samples(glyphs: Path, tars: Path, tmp_path: Path) -> None:
    recipe = stream_recipe(glyphs, tars, tmp_path / "run", train__duration={"steps": 40})
    run_on_ranks(2, train_on_ranks, [recipe])
    state = saved_state(recipe.run)
    assert state["step"] == 40
    assert len(state["cursor"]["bad"]) == 1


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"class_weights": "balanced"}, "head.class_weights is balanced.*kway shard index.* none"),
        ({"loss": {"kind": "nce"}}, "head.loss.noise is frequency.*kway shard index.* uniform"),
    ],
)
def test_the_error_for_settings_that_need_class_counts_contains_the_fix(
    glyphs: Path, tars: Path, tmp_path: Path, head: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        stream_recipe(glyphs, tars, tmp_path / "run", head=head)
    stream_recipe(
        glyphs, tars, tmp_path / "run", head={"loss": {"kind": "nce", "noise": "uniform"}}
    )
