"""A compiled model with a head trains like the same model without torch.compile."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from heads import ClassHead
from heads.hierarchical import HierarchicalSoftmaxHead
from tests.heads.cases import label_tree, make_loss

NUM_STEPS = 12  # exceeds torch.compile's recompilation limit
# Only the backbone is compiled, so any backend shows that the head is left as it is.
CASES = [("ce", "vtree", "eager"), ("hierarchical_softmax", "vtree", "aot_eager")]


class Backbone(nn.Module):
    """A small custom module, because torch.nn's own modules are not compiled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class Model(nn.Module):
    """A backbone and a head over 70 classes."""

    def __init__(self, kind: str, weighting: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = Backbone()
        tree = label_tree(weighting, 70)
        if kind == "hierarchical_softmax":
            self.head: ClassHead = HierarchicalSoftmaxHead(5, tree)
        else:
            self.head = ClassHead(5, tree, make_loss(kind, 70))

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.backbone(inputs), labels)


def trained(model: nn.Module) -> list[dict[str, Tensor]]:
    """The loss and gradients of each Adam step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    steps = []
    for _ in range(NUM_STEPS):
        inputs = torch.randn(9, 6, generator=generator)
        labels = torch.randint(70, (9,), generator=generator)
        optimizer.zero_grad()
        loss = model(inputs, labels)
        loss.backward()
        gradients = {
            name.removeprefix("_orig_mod."): parameter.grad.clone()
            for name, parameter in model.named_parameters()
        }
        steps.append({"loss": loss.detach(), **gradients})
        optimizer.step()
    return steps


@pytest.fixture(autouse=True)
def _nothing_compiled_yet():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("kind", "weighting", "backend"), CASES)
def test_a_compiled_model_trains_like_an_eager_one_and_is_compiled_once(kind, weighting, backend):
    model = torch.compile(Model(kind, weighting), backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = trained(model)
    for ours, theirs in zip(got, trained(Model(kind, weighting)), strict=True):
        assert ours.keys() == theirs.keys()
        for name, expected in theirs.items():
            torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-6, msg=name)
    assert counters["stats"]["unique_graphs"] == 1
