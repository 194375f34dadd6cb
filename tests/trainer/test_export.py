"""An exported bundle computes the same logits as the task, for every weighting and world size."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.heads.cases import naive_logits, naive_rows
from tests.ranks import rank_world, run_on_ranks
from tests.shards import glyph_recipe
from tests.trainer.training import held_out, train_on_ranks
from trainer.bundle.bundle import Bundle
from trainer.bundle.export import export_run
from trainer.config import Recipe
from trainer.evaluation import load_evaluation
from trainer.run.folder import RunFolder
from trainer.run.trained_run import open_trained
from trainer.train import train

LEARNED = {"kind": "cosine", "scale": 5.0, "learn_scale": True, "learn_offset": True, "prior": 1.0}


# The class weights, the loss and the logit map of runs.
CASES = {
    "dense": ("ce", {}),
    "dense-learned": ("bce", LEARNED),
    "utree": ("ce", {}),
    "vtree": ("batch_ce", {"kind": "arcface", "scale": 8.0}),
}


@pytest.fixture(scope="module")
def trained(glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recipe]:
    """Runs of the cases: the first one on a single rank, and the others on two."""
    folder = tmp_path_factory.mktemp("runs")
    recipes = {
        case: glyph_recipe(
            glyphs,
            folder / case,
            head__weights__kind=case.partition("-")[0],
            head__loss__kind=loss,
            head__logits=logits,
        )
        for case, (loss, logits) in CASES.items()
    }
    first, *others = recipes.values()
    train(first, rank_world())
    run_on_ranks(2, train_on_ranks, others)
    return recipes


def bundle_logits(bundle: Bundle, inputs: dict[str, Tensor]) -> np.ndarray:
    with torch.no_grad():
        features = bundle.load_backbone()(inputs)
        return bundle.logits(features, range(len(bundle.classes))).numpy()


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


@pytest.mark.parametrize("case", CASES)
def test_a_bundle_has_the_same_logits_as_the_task_and_the_thresholds_of_the_evaluation(
    case, trained, glyphs, tmp_path
):
    """The thresholds were computed by the training ranks, and the logits are computed from the
    bundle alone.
    """
    recipe, (loss, _) = trained[case], CASES[case]
    export_run(recipe.run, tmp_path / "bundle", rank_world())
    inputs, labels = held_out(glyphs, recipe)
    with Bundle.open(tmp_path / "bundle") as bundle:
        bundle.verify()
        logits = bundle_logits(bundle, inputs)
        spec, of_classes = bundle.spec, bundle.thresholds
    np.testing.assert_allclose(logits, task_logits(recipe.run, inputs), rtol=1e-5, atol=1e-5)
    assert logits.std(axis=1).min() > 1e-3

    assert (spec.loss.kind, spec.loss.aligned) == (loss, loss != "ce")
    card = (tmp_path / "bundle" / "MODEL_CARD.md").read_text()
    assert ("NOT aligned with the Principle of Logit Separation" in card) == (loss == "ce")
    assert of_classes.positives.tolist() == np.bincount(labels, minlength=13).tolist()
    true = logits[np.arange(len(labels)), labels]
    evaluation = load_evaluation(RunFolder(recipe.run).evaluations, step=4)
    promises = evaluation.promises.by_class()
    for name in ("thresholds", "kinds", "pass_rates"):
        np.testing.assert_array_equal(getattr(of_classes, name), getattr(promises, name))
    assert [entry.min_positives for entry in spec.recalls] == [22, 230]
    for column, entry in enumerate(spec.recalls):
        found = of_classes.thresholds[:, column]
        assert (true >= entry.pooled).mean() >= entry.recall
        reached = np.bincount(labels[true >= found[labels]], minlength=13)
        assert reached.tolist() == of_classes.reached[:, column, 0].tolist()
        of_any = (logits >= found).sum(0)
        assert of_any.tolist() == of_classes.reached[:, column, 1].tolist()


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run with the loss `ce`."""
    return shutil.copytree(finished / "run", tmp_path / "run")


def test_the_error_for_an_evaluation_from_an_older_version_contains_the_fix(run, tmp_path):
    (path,) = RunFolder(run).evaluations.glob("*.safetensors")
    tensors = load_file(path)
    del tensors["confidence"]
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"'confidence', .* run `kway eval` again"):
        export_run(run, tmp_path / "bundle", rank_world())


def test_a_failed_export_leaves_no_new_files_and_an_intact_old_bundle(finished, run, tmp_path):
    out = Path(shutil.copytree(finished / "bundle", tmp_path / "bundle"))
    (path,) = RunFolder(run).evaluations.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"is damaged .*: run `kway eval` again"):
        export_run(run, out, rank_world(), force=True)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "bundle"}
    with Bundle.open(out) as bundle:
        bundle.verify()
