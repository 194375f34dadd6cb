"""Operation counts match formulas and papers, and MFU is absent if the peak rate is unknown."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from data.images.config import ImageConfig
from heads import build_head
from heads.config import HeadConfig
from tests.shards import text_recipe
from tests.trainer.telemetry_reports import NUMBERS, records, telemetry
from trainer.backbone.config import BackboneConfig
from trainer.backbone.trace import FakeBackbone
from trainer.telemetry.mfu import ModelFlops, head_flops

CPU = torch.device("cpu")


def forward_of(config: dict[str, Any], inputs: dict[str, torch.Tensor]) -> float:
    image = ImageConfig() if "pixel_values" in inputs else None
    fake = FakeBackbone(BackboneConfig(config=config), image)
    return fake.forward_flops(inputs, rows=2) / 2


def test_resnet50_operations_match_the_paper():
    pixels = torch.empty(1, 3, 224, 224, dtype=torch.uint8, device="meta")
    counted = forward_of({"model_type": "resnet"}, {"pixel_values": pixels})
    # He et al. (2016), table 1, report 3.8e9 multiply-adds. With the stride in the 3 x 3
    # convolution, as here, there are 4.1e9.
    assert counted == pytest.approx(2 * 4.09e9, rel=0.01)


@pytest.mark.parametrize("length", [8, 128])
def test_bert_operations_match_its_matrix_products(length):
    tokens = torch.empty(1, length, dtype=torch.int64, device="meta")
    counted = forward_of({"model_type": "bert"}, {"input_ids": tokens, "attention_mask": tokens})
    layers, dim, wide = 12, 768, 3072
    matrices = 2 * length * (4 * dim * dim + 2 * dim * wide)
    attention = 4 * length * length * dim
    assert counted == layers * (matrices + attention)


def product(_: Any, left: list[int], right: list[int], **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


@pytest.mark.parametrize("bias", [True, False])
def test_the_head_formula_matches_the_operations_of_the_engine(bias):
    config = HeadConfig(bias=bias)
    head = build_head(
        config, dim=24, num_classes=50, label_vectors=None, mesh=None, seed=0, device=CPU
    )
    features = torch.randn(6, 24, requires_grad=True)
    # The counter has no built-in formula for the matrix product that adds to its target in place.
    in_place = {torch.ops.aten.addmm_: product}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        head(features, torch.arange(6)).backward()
    assert counter.get_total_flops() == 6 * head_flops(config, dim=24, num_classes=50)


@pytest.mark.parametrize(
    ("changes", "classes"),
    [
        ({"loss": {"kind": "ce", "sample_rate": 0.25}}, 25),
        ({"loss": {"kind": "nce", "samples": 7}}, 7),
        ({"loss": {"kind": "nce"}}, 100),
        ({"weights": {"kind": "factored"}, "loss": {"kind": "quadratic"}}, None),
    ],
)
def test_only_logits_that_are_computed_are_counted(changes, classes):
    counted = head_flops(HeadConfig(bias=False, **changes), dim=10, num_classes=100)
    assert counted == (None if classes is None else 6 * 10 * classes)


def text_flops(texts: Path, run: Path) -> ModelFlops:
    return ModelFlops(text_recipe(texts, run), num_classes=20)


def rows(number: int, length: int) -> dict[str, torch.Tensor]:
    tokens = torch.ones(number, length, dtype=torch.int64)
    return {"input_ids": tokens, "attention_mask": tokens}


def test_mfu_counts_the_rows_of_this_rank_with_their_lengths(texts, tmp_path):
    flops, peak = text_flops(texts, tmp_path), 1e-3
    random = torch.get_rng_state()
    with telemetry(tmp_path, flops=flops, peak_tflops=peak, port=0) as report:
        report.beat(1, inputs=rows(3, 8))
        report.beat(2, inputs=rows(5, 16))
        report.step(2, **NUMBERS)
    short, long = flops.per_row(rows(1, 8)), flops.per_row(rows(1, 16))
    assert short is not None
    assert long is not None
    assert long > short
    assert torch.equal(torch.get_rng_state(), random)
    (step,) = records(tmp_path)
    done = 3 * short + 5 * long
    assert step["mfu"] == pytest.approx(done / (2 * step["step_seconds"]) / (peak * 1e12))
