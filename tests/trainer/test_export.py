"""An exported bundle computes the same logits as the task, for every weighting and world size."""

import math
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.images.decode import decode, for_evaluation
from data.shards.split import open_split
from tests.heads.cases import naive_logits, naive_rows
from tests.ranks import rank_world, run_on_ranks
from tests.shards import glyph_recipe
from trainer.bundle.bundle import Bundle
from trainer.bundle.export import export_run
from trainer.config import Recipe
from trainer.evaluation import load_evaluation, save_evaluation
from trainer.evaluation.run_evaluation import EvaluationRequest, evaluate_run
from trainer.run.folder import RunFolder
from trainer.run.trained_run import open_trained
from trainer.train import train

LEARNED = {"kind": "cosine", "scale": 5.0, "learn_scale": True, "learn_offset": True, "prior": 1.0}


def train_here(recipe: Recipe) -> None:
    train(recipe, rank_world())


def held_out(shards: Path, recipe: Recipe) -> tuple[dict[str, Tensor], np.ndarray]:
    """Return all images of the test split as one batch, and their labels."""
    with open_split(shards, "test") as split:
        images = [
            for_evaluation(decode(split.read(i)[0], 1), recipe.data.image)
            for i in range(len(split))
        ]
        return {"pixel_values": torch.from_numpy(np.stack(images))}, split.labels.copy()


def bundle_logits(bundle: Bundle, inputs: dict[str, Tensor]) -> np.ndarray:
    with torch.no_grad():
        features = bundle.load_backbone()(inputs)
        return bundle.logits(features, range(len(bundle.names))).numpy()


def task_logits(run: Path, inputs: dict[str, Tensor]) -> np.ndarray:
    """Return logits computed from the node vectors in the checkpoint, summed path by path."""
    task = open_trained(run, rank_world()).task
    head = task.head
    nodes = head.weight.detach()
    if head.bias is not None:
        nodes = torch.cat([nodes, head.bias.detach()[:, None]], dim=1)
    inner = nodes[head.tree.has_children.nonzero()[0]]
    assert not len(inner) or inner.abs().max() > 1e-3  # inner nodes start at zero
    with torch.no_grad():
        features = task.features(inputs)
        if head.bias is not None:
            return naive_logits(head.tree, features, nodes).numpy()
        rows, logits = naive_rows(head.tree, nodes), head.evaluated_map()
        cosines = features @ rows.T / rows.norm(dim=1) / features.norm(dim=1)[:, None]
        return (logits.scale * cosines + logits.offset).numpy()


def threshold(scores: np.ndarray, recall: float) -> float:
    """Return the largest threshold reached by at least the fraction `recall` of the scores."""
    return float(np.sort(scores)[len(scores) - math.ceil(recall * len(scores))])


def rounding_margin(run: Path) -> float:
    """Return the margin by which export lowers thresholds to allow for rounding differences in
    other batches and engines.
    """
    found = load_evaluation(RunFolder(run).evaluations, step=4)
    largest = np.nanmax(abs(np.vstack([found.classes.threshold.numpy(), found.pooled.numpy()])))
    return 1e-5 * float(largest)


@pytest.mark.parametrize(
    ("weights", "loss", "logits", "world_size"),
    [
        ("dense", "ce", {}, 1),
        ("dense", "bce", LEARNED, 2),
        ("utree", "batch_ce", {}, 1),
        ("utree", "ce", {}, 2),
        ("vtree", "bce", {}, 1),
        ("vtree", "batch_ce", {"kind": "arcface", "scale": 8.0}, 2),
    ],
)
def test_a_bundle_has_the_same_logits_as_the_task_and_the_thresholds_of_the_evaluation(
    weights, loss, logits, world_size, glyphs, tmp_path
):
    """The thresholds were computed by the training ranks, and the logits are computed from the
    bundle alone.
    """
    changes = {"head__weights__kind": weights, "head__loss__kind": loss, "head__logits": logits}
    recipe = glyph_recipe(glyphs, tmp_path / "run", **changes)
    run_on_ranks(world_size, train_here, recipe)
    export_run(recipe.run, tmp_path / "bundle", rank_world())
    inputs, labels = held_out(glyphs, recipe)
    with Bundle.open(tmp_path / "bundle") as bundle:
        bundle.verify()
        logits = bundle_logits(bundle, inputs)
        spec, of_classes = bundle.spec, bundle.thresholds
    np.testing.assert_allclose(logits, task_logits(recipe.run, inputs), rtol=1e-5, atol=1e-5)
    assert logits.std(axis=1).min() > 1e-3

    assert spec.loss.kind == loss
    assert of_classes.positives.tolist() == np.bincount(labels, minlength=13).tolist()
    true = logits[np.arange(len(labels)), labels]
    margin = rounding_margin(recipe.run)
    close = {"rel": 1e-6, "abs": margin / 2}
    for column, entry in enumerate(spec.recalls):
        pooled = threshold(true, entry.recall) - margin
        assert entry.pooled == pytest.approx(pooled, **close)
        expected = (
            np.array([threshold(true[labels == j], entry.recall) for j in range(13)]) - margin
        )
        found = of_classes.thresholds[:, column]
        assert found.tolist() == pytest.approx(expected, **close)
        reached = np.bincount(labels[true >= found[labels]], minlength=13)
        assert (reached >= entry.recall * of_classes.positives).all(), "rounding lost a sample"


@pytest.fixture(scope="module")
def runs(glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs with the loss `ce`, keyed by name. Tests that change a run must copy it
    first."""
    folder = tmp_path_factory.mktemp("runs")
    for name, z_loss in (("plain", 0.0), ("z_loss", 1e-3)):
        train_here(glyph_recipe(glyphs, folder / name, head__loss__z_loss=z_loss))
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def run(runs: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(runs["plain"], tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "present", "absent"),
    [
        ("z_loss", "| aligned with the Principle of Logit Separation", "NOT aligned"),
        ("plain", "| NOT aligned with the Principle of Logit Separation", "| aligned"),
    ],
)
def test_the_model_card_contains_the_measures_and_the_alignment_of_the_loss(
    name, present, absent, runs, tmp_path
):
    run = runs[name]
    export_run(run, tmp_path / "bundle", rank_world())
    card = (tmp_path / "bundle" / "MODEL_CARD.md").read_text()
    assert present in card
    assert absent not in card
    evaluation = load_evaluation(RunFolder(run).evaluations, step=4)
    assert {"top1", "sa", "auprc", "precision_at_recall_0.9"} <= evaluation.metrics.keys()
    for measure, value in evaluation.metrics.items():
        assert f"| {measure} | {value:.4f} |" in card
    assert f"on split `test` ({evaluation.num_samples} samples)" in card
    with Bundle.open(tmp_path / "bundle") as bundle:
        assert bundle.spec.loss.aligned is (name == "z_loss")
        assert f'--class "{bundle.names.names[0]}"' in card


def test_a_class_with_few_samples_uses_the_pooled_threshold(run, tmp_path):
    folder = RunFolder(run).evaluations
    evaluation = load_evaluation(folder, step=4)
    positives = evaluation.classes.positives
    positives[0], positives[1], positives[2] = 0, 8, 9
    evaluation.classes.threshold[0] = math.nan
    save_evaluation(folder, evaluation, step=4)
    export_run(run, tmp_path / "bundle", rank_world())
    pooled = pytest.approx(float(evaluation.pooled[0]) - rounding_margin(run))
    with Bundle.open(tmp_path / "bundle") as bundle:
        assert [entry.min_positives for entry in bundle.spec.recalls] == [9, 99]
        used = [bundle.threshold(j, 0.9) for j in range(3)]
        assert [threshold.source for threshold in used] == ["pooled", "pooled", "class"]
        assert used[0].score == used[1].score == pooled
        assert bundle.threshold(2, 0.99).source == "pooled"
    card = (tmp_path / "bundle" / "MODEL_CARD.md").read_text()
    assert f"| 0.9 | 9 | {int((positives < 9).sum())} |" in card
    export_run(run, tmp_path / "bundle", rank_world(), min_positives=8, force=True)
    with Bundle.open(tmp_path / "bundle") as bundle:
        sources = [bundle.threshold(j, 0.9).source for j in range(3)]
    assert sources == ["pooled", "class", "class"]


def test_a_bundle_contains_the_validation_counts_at_each_class_threshold(run, tmp_path):
    evaluation = load_evaluation(RunFolder(run).evaluations, step=4)
    positives = evaluation.classes.positives
    least = int(positives.min()) + 1
    export_run(run, tmp_path / "bundle", rank_world(), min_positives=least)
    of_class, of_any = evaluation.reached_pooled[:, 0].double().unbind(1)
    mean_precision = np.where(of_any > 0, of_class / of_any.clamp(min=1), 0).mean()
    sources = set()
    with Bundle.open(tmp_path / "bundle") as bundle:
        for j in range(len(positives)):
            found, num = bundle.threshold(j, 0.9), int(positives[j])
            reached = (found.class_reached, found.all_reached)
            assert found.class_samples == num
            if found.source == "class":
                assert num >= least
                assert reached == tuple(evaluation.classes.reached[j, 0].tolist())
                assert found.expected_precision == reached[0] / reached[1]
                assert found.expected_precision == evaluation.classes.precision_at[j, 0]
                assert found.samples == num
            else:
                assert reached == tuple(evaluation.reached_pooled[j, 0].tolist())
                assert found.expected_precision == pytest.approx(mean_precision)
                assert found.samples == evaluation.num_samples
            sources.add(found.source)
    assert sources == {"class", "pooled"}
    card = (tmp_path / "bundle" / "MODEL_CARD.md").read_text()
    assert f" | {mean_precision:.3f} |" in card


def test_the_error_for_an_evaluation_from_an_older_version_contains_the_fix(run, tmp_path):
    (path,) = RunFolder(run).evaluations.glob("*.safetensors")
    tensors = load_file(path)
    del tensors["reached_pooled"]
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"'reached_pooled', .* run `kway eval` again"):
        export_run(run, tmp_path / "bundle", rank_world())


def test_thresholds_for_another_recall_require_an_evaluation(run, tmp_path):
    options = {"recalls": [0.95, 0.9, 0.8]}
    with pytest.raises(FileNotFoundError, match="was not evaluated at these recalls") as caught:
        export_run(run, tmp_path / "bundle", rank_world(), **options)
    assert not (tmp_path / "bundle").exists()
    command = shlex.split(str(caught.value).split("`")[1])
    setting = "evaluation.recalls=[0.8, 0.9, 0.95, 0.99]"
    assert command == ["kway", "eval", str(run), "--checkpoint", "4", "--set", setting]
    evaluate_run(EvaluationRequest(run, checkpoint=4, settings=(setting,)), rank_world())
    export_run(run, tmp_path / "bundle", rank_world(), **options)
    with Bundle.open(tmp_path / "bundle") as bundle:
        scores = [bundle.threshold(0, recall).score for recall in (0.8, 0.9, 0.95, 0.99)]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > scores[-1]
    assert "precision_at_recall_0.95" in (tmp_path / "bundle" / "MODEL_CARD.md").read_text()
    export_run(run, tmp_path / "other", rank_world(), recalls=[0.9])  # a recall set in the recipe


def test_the_onnx_backbone_computes_the_same_features_as_the_bundle(glyphs, run, tmp_path):
    export_run(run, tmp_path / "bundle", rank_world(), onnx=True)
    recipe = RunFolder(run).load_recipe()
    inputs, _ = held_out(glyphs, recipe)
    with Bundle.open(tmp_path / "bundle") as bundle, torch.no_grad():
        bundle.verify()
        assert bundle.has_onnx
        found, expected = (
            bundle.load_onnx_backbone(threads=1)(inputs),
            bundle.load_backbone()(inputs),
        )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_error_for_a_run_without_evaluation_contains_the_fix(run, tmp_path):
    for path in RunFolder(run).evaluations.iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match="run `kway eval` on the run first"):
        export_run(run, tmp_path / "bundle", rank_world())
    assert names(tmp_path) == {"run"}


def test_an_existing_folder_is_replaced_only_with_force(run, tmp_path):
    out = tmp_path / "bundle"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="already exists"):
        export_run(run, out, rank_world())
    assert names(out) == {"mine.txt"}
    export_run(run, out, rank_world(), force=True)
    Bundle.open(out).close()
    assert "mine.txt" not in names(out)
    assert names(tmp_path) == {"run", "bundle"}


@pytest.mark.parametrize("force", [False, True])
def test_a_failed_export_leaves_no_new_files_and_an_intact_old_bundle(force, run, tmp_path):
    out = tmp_path / "bundle"
    if force:
        export_run(run, out, rank_world())
    before = names(tmp_path)
    (path,) = RunFolder(run).evaluations.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"is damaged .*: run `kway eval` again"):
        export_run(run, out, rank_world(), force=force)
    assert names(tmp_path) == before
    if force:
        with Bundle.open(out) as bundle:
            bundle.verify()
