"""`HeadIntegration` in a loop that knows only the backbone equals a plain loop in one process."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from heads import ClassHead, CrossEntropy, Dot, FusedSGD, HeadIntegration
from heads.factored import FactoredHead
from heads.losses import BatchCrossEntropy, SphericalSoftmax
from tests.ranks import rank_mesh, run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LOSSES = {"sampled": CrossEntropy(sample_rate=0.5), "batch": BatchCrossEntropy()}


def modules(loss, mesh=None) -> tuple[nn.Module, ClassHead, torch.optim.Optimizer]:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(6, 5, dtype=torch.float64), nn.ReLU())
    logits = Dot(learn_scale=True)
    options = {"logits": logits, "mesh": mesh, "init_std": 0.3, "dtype": torch.float64}
    head = ClassHead(5, 50, LOSSES[loss], **options)
    parameters = [*backbone.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.05, fused=True)
    return backbone, head, optimizer


def batch(step: int, call: int):
    generator = torch.Generator().manual_seed(10 * step + call)
    inputs = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(50, (12,), generator=generator)


def plain_loop(loss: str):
    """Four steps of two calls each in one process, clipped by torch."""
    backbone, head, optimizer = modules(loss)
    parameters = [*backbone.parameters(), *head.parameters()]
    for step in range(4):
        for call in range(2):
            inputs, labels = batch(step, call)
            (head(backbone(inputs), labels) / 2).backward()
        assert nn.utils.clip_grad_norm_(parameters, 0.1) > 0.1
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().numpy() for p in backbone.parameters()], values(head)


def values(head: ClassHead) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in head.named_parameters()}


def integrated_steps(loss, steps, data_axis=None, *, saves=None, loads=None, library=None):
    """Take `steps`; return the weights, this rank's nodes, and the state that a library saves."""
    mesh, rank, size = None, 0, 1
    if data_axis is not None:
        mesh = rank_mesh(data_axis)
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    backbone, head, optimizer = modules(loss, mesh)
    integration = HeadIntegration(head, optimizer, max_norm=0.1)
    if library is not None:  # the weights of the backbone, and the moments that rank 0 has
        weights, moments = library
        for parameter, value in zip(backbone.parameters(), weights, strict=True):
            parameter.data.copy_(torch.from_numpy(value))
        state = optimizer.state_dict()
        state["state"] = {
            index: {name: torch.from_numpy(value) for name, value in each.items()}
            for index, each in moments.items()
        }
        optimizer.load_state_dict(state)
    if loads is not None:
        integration.load(loads)
    model = backbone if mesh is None else DistributedDataParallel(backbone)
    rows = slice(12 * rank // size, 12 * (rank + 1) // size)
    for step in steps:
        for call in range(2):
            integration.sum_gradients(model)
            inputs, labels = batch(step, call)
            waits = mesh is not None and call == 0
            with model.no_sync() if waits else nullcontext():
                (head(model(inputs[rows]), labels[rows]) / 2).backward()
        optimizer.step()
        backbone.zero_grad()  # a library zeroes only its own model
    if saves is not None:
        integration.save(saves)
    state = {
        index: {name: tensor.numpy() for name, tensor in each.items()}
        for index, each in optimizer.state_dict()["state"].items()
    }
    held = slice(head.engine.weights.start, head.engine.weights.stop)
    return [p.detach().numpy() for p in backbone.parameters()], values(head), held, state


def saved_steps(loss, data_axis, folder):
    return integrated_steps(loss, range(2), data_axis, saves=folder)


def resumed_steps(loss, data_axis, folder, library):
    return integrated_steps(loss, range(2, 4), data_axis, loads=folder, library=library)


@pytest.mark.parametrize(
    ("loss", "data_axis", "resumed_on"), [("sampled", 1, 3), ("sampled", 2, 1), ("batch", 1, 1)]
)
def test_a_run_that_accumulates_clips_and_resumes_on_other_ranks_equals_a_plain_loop(
    loss, data_axis, resumed_on, tmp_path
):
    backbone, head = plain_loop(loss)
    folder = str(tmp_path / "head")
    weights, _, _, moments = run_on_ranks(2, saved_steps, loss, data_axis, folder)[0]
    library = weights, moments
    if resumed_on == 1:
        ranks = [resumed_steps(loss, None, folder, library)]
    else:
        ranks = run_on_ranks(resumed_on, resumed_steps, loss, 1, folder, library)
    for found_backbone, found_head, held, _ in ranks:
        for one, other in zip(found_backbone, backbone, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-10)
        for name, value in found_head.items():
            want = head[name][held] if value.ndim else head[name]
            np.testing.assert_allclose(value, want, rtol=1e-8, atol=1e-10, err_msg=name)


def trained(loss="batch"):
    backbone, head, optimizer = modules(loss)
    integration = HeadIntegration(head, optimizer)
    head(backbone(batch(0, 0)[0]), batch(0, 0)[1]).backward()
    optimizer.step()
    return head, optimizer, integration


def after_a_clipped_step(how: str) -> list[torch.Tensor]:
    backbone, head, _ = modules("batch")
    parameters = [*backbone.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5, fused=True)
    inputs, labels = batch(0, 0)

    def closure():
        loss = head(backbone(inputs), labels)
        loss.backward()
        return loss

    if how == "by torch":
        closure()
        nn.utils.clip_grad_norm_(parameters, 0.01)
        optimizer.step()
    else:
        HeadIntegration(head, optimizer, max_norm=0.01)
    if how == "closure":
        optimizer.step(closure)
    elif how == "loss scale":  # of a GradScaler, for torch's fused optimizers
        (1024 * head(backbone(inputs), labels)).backward()
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("how", ["closure", "loss scale"])
def test_gradients_of_a_closure_and_scaled_gradients_are_clipped(how):
    for one, other in zip(after_a_clipped_step(how), after_a_clipped_step("by torch"), strict=True):
        torch.testing.assert_close(one, other)


def test_a_step_after_loading_only_the_optimizer_is_an_error():
    _, optimizer, _ = trained()
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match=r"call HeadIntegration\.load"):
        optimizer.step()


def test_a_head_is_saved_only_to_a_new_folder(tmp_path):
    _, _, integration = trained()
    integration.save(tmp_path)
    with pytest.raises(FileExistsError, match="pass a new folder"):
        integration.save(tmp_path)


@pytest.mark.parametrize(
    "other",
    [
        ClassHead(5, 51, CrossEntropy()),
        ClassHead(5, 50, CrossEntropy(), bias=False),
        ClassHead(5, 50, CrossEntropy(), dtype=torch.bfloat16),
    ],
    ids=["classes", "parameters", "dtype"],
)
def test_a_different_head_is_not_loaded(other, tmp_path):
    head = ClassHead(5, 50, CrossEntropy())
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    integration = HeadIntegration(head, optimizer)
    head(torch.ones(2, 5), torch.tensor([0, 1])).backward()
    optimizer.step()
    integration.save(tmp_path)
    before = other.weight.detach().clone()
    integration = HeadIntegration(other, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="other classes, parameters or dtypes"):
        integration.load(tmp_path)
    assert torch.equal(other.weight, before)


def test_a_checkpoint_without_the_files_of_a_rank_is_not_loaded(tmp_path):
    run_on_ranks(2, saved_steps, "batch", 1, str(tmp_path))
    first, _ = sorted(tmp_path.iterdir())
    first.unlink()
    _, _, integration = trained()
    with pytest.raises(ValueError, match="copy the files of all ranks"):
        integration.load(tmp_path)


def test_an_optimizer_that_does_not_update_the_head_is_rejected():
    fused, plain = (ClassHead(5, 50, CrossEntropy()) for _ in range(2))
    FusedSGD(fused, lr=0.1)
    factored = FactoredHead(5, 50, SphericalSoftmax())
    for head in (fused, factored):
        with pytest.raises(ValueError, match="does not update every parameter"):
            HeadIntegration(head, torch.optim.SGD(head.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"pass head\.parameters\(\)"):
        HeadIntegration(plain, torch.optim.SGD([plain.weight], lr=0.1))
