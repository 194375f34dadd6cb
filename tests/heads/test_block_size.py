"""The blocks of a head fit the memory limit and fill a GPU, and do not change the results."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from heads import ClassHead, Cosine
from heads.engine.block_size import Processor
from heads.losses import CrossEntropy
from tests.heads.cases import make_loss

CPU = Processor("cpu")
H100 = Processor("cuda", num_sms=132)  # a wave of tiles has 128 * 132 classes


@pytest.mark.parametrize(
    ("processor", "rows", "memory_mib", "classes"),
    [
        (CPU, 256, 512, 16_384),
        (CPU, 1024, 512, 4096),
        (CPU, 256, 64, 2048),
        (CPU, 256, 0, 64),
        (CPU, 1, 1, 8192),
        (H100, 256, 512, 2 * 128 * 132),
        (H100, 1000, 8192, 8 * 128 * 132),
        (H100, 8192, 512, 2048),
        (H100, 65_536, 1, 64),
    ],
)
def test_a_block_fits_the_cache_of_a_cpu_and_is_waves_of_tiles_on_a_gpu(
    processor: Processor, rows: int, memory_mib: int, classes: int
) -> None:
    assert processor.classes_at_once(4 * rows, memory_mib << 20) == classes


def step(head: ClassHead, features: Tensor, labels: Tensor) -> tuple[list[int], list[Tensor]]:
    """Return the number of classes of each block, and the loss and its gradients."""
    features = features.clone().requires_grad_()
    loss = head(features, labels)
    sizes = [len(block.class_ids) for block in loss.grad_fn.step.walk.blocks]
    loss.backward()
    assert head.bias is not None
    return sizes, [loss.detach(), features.grad, head.weight.grad, head.bias.grad]


@pytest.mark.parametrize("kind", ["ce", "topk_hinge", "smooth_topk"])
def test_gpus_with_other_blocks_compute_the_same(kind: str) -> None:
    num_classes, dim = 4000, 5
    features, labels = torch.randn(9, dim, dtype=torch.float64), torch.randint(num_classes, (9,))
    found = {}
    for name, processor, memory_mib in (
        ("cpu", CPU, 64),
        ("1 SM", Processor("cuda", num_sms=1), 1),
        ("3 SMs", Processor("cuda", num_sms=3), 1),
        ("100 SMs", Processor("cuda", num_sms=100), 1),
    ):
        loss = make_loss(kind, num_classes)
        head = ClassHead(
            dim, num_classes, loss, init_std=0.3, memory_mib=memory_mib, dtype=torch.float64
        )
        head.engine = replace(head.engine, processor=processor)
        found[name] = step(head, features, labels)
    sizes = {name: sizes for name, (sizes, _) in found.items()}
    assert sizes == {
        "cpu": [4000],
        "1 SM": [1024, 1024, 1024, 928],
        "3 SMs": [1536, 1536, 928],
        "100 SMs": [1024, 1024, 1024, 928],
    }
    for _, results in found.values():
        for mine, theirs in zip(results, found["cpu"][1], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("logits", "classes"), [(None, 1024), (Cosine(), 128)], ids=["read in place", "normalized"]
)
def test_copied_class_rows_fit_like_logits(logits: Cosine | None, classes: int) -> None:
    # The logits of a class take 4 * 8 bytes, and its row 4 * 64. A block has 32 KiB for each.
    head = ClassHead(64, 10_000, CrossEntropy(), logits=logits, bias=False, memory_mib=1)
    loss = head(torch.zeros(8, 64, requires_grad=True), torch.arange(8))
    assert len(loss.grad_fn.step.walk.blocks[0].class_ids) == classes
