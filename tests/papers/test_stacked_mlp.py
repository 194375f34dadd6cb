"""The stacked networks of paper 002 against `MlpModel` and `ClassHead`, and their resumption."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from experiments.networks import MlpConfig, MlpModel
from experiments.papers import stacked_mlp
from experiments.papers.job import Folders
from experiments.papers.stacked_mlp import Layer, Normalized, StackedMlp, training
from heads import ClassHead
from heads.losses import LOSSES, ClassFacts


@pytest.mark.parametrize(
    "loss", ["ce", "batch_ce", "batch_max_margin", "nce", "sigmoid_cs", "ccql", "taylor_softmax"]
)
def test_each_network_of_a_stack_trains_like_a_torch_module_with_a_class_head(loss: str) -> None:
    torch.manual_seed(0)
    rates, sizes, classes = [0.1, 0.02], (7, 5), 4
    counts = torch.tensor([3.0, 1, 4, 2], dtype=torch.float64)
    modules = []
    for _ in rates:
        config = MlpConfig(image_size=3, num_channels=1, hidden_sizes=sizes)
        head = ClassHead(
            sizes[1], classes, LOSSES[loss](), class_counts=counts, dtype=torch.float64
        )
        modules.append((MlpModel(config).double(), head))
    hidden = [
        Normalized(
            torch.stack([model.layers[i][1].weight.detach() for model, _ in modules]),
            torch.zeros(len(rates), sizes[i], dtype=torch.float64),
        )
        for i in range(2)
    ]
    weight, bias = (
        torch.stack([getattr(head, name).detach() for _, head in modules])
        for name in ("weight", "bias")
    )
    prepared = LOSSES[loss]().prepare(ClassFacts(classes, counts))
    stack = StackedMlp(hidden, Layer(weight, bias), prepared)
    optimizers = [
        torch.optim.SGD([*model.parameters(), *head.parameters()], lr=lr, momentum=0.9)
        for lr, (model, head) in zip(rates, modules, strict=True)
    ]
    for _ in range(5):
        images = torch.randn(2, 6, 9, dtype=torch.float64)
        labels = torch.randint(classes, (2, 6))
        stack.step(images, labels, torch.tensor(rates, dtype=torch.float64))
        for i, ((model, head), sgd) in enumerate(zip(modules, optimizers, strict=True)):
            sgd.zero_grad()
            features = model(images[i].view(6, 1, 3, 3)).last_hidden_state.flatten(1)
            head(features, labels[i]).backward()
            sgd.step()
    tests = torch.randn(8, 9, dtype=torch.float64)
    for logits, (model, head) in zip(stack.logits(tests), modules, strict=True):
        model.eval()
        features = model(tests.view(8, 1, 3, 3)).last_hidden_state.flatten(1)
        expected = features @ head.weight.T + head.bias
        torch.testing.assert_close(logits, expected.detach(), rtol=0, atol=1e-10)


def test_an_interrupted_training_resumes_with_the_same_result(
    papers_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = training("ce", [0.1, 0.01], [1, 2], steps=6)
    uninterrupted = stacked_mlp.train(job.settings, _folders(papers_data, tmp_path / "one"))
    monkeypatch.setattr(stacked_mlp, "_SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    folders = _folders(papers_data, tmp_path / "two")
    with monkeypatch.context() as patch:
        step = StackedMlp.step
        steps = []

        def stop_at_the_fourth(*arguments: object) -> None:
            steps.append(1)
            if len(steps) == 4:
                raise KeyboardInterrupt
            step(*arguments)  # type: ignore[arg-type]

        patch.setattr(StackedMlp, "step", stop_at_the_fourth)
        with pytest.raises(KeyboardInterrupt):
            stacked_mlp.train(job.settings, folders)
    (checkpoint,) = (folders.shards.parent / "networks").iterdir()
    assert load_file(checkpoint)["step"] == 3
    assert stacked_mlp.train(job.settings, folders) == uninterrupted


def _folders(data: Path, work: Path) -> Folders:
    work.mkdir()
    return Folders(data, work / "shards", work)
