"""MFU: operations counted as formulas and papers have them, and no number where none is known."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from data.images.config import ImageConfig
from heads import build_head
from heads.config import HeadConfig
from tests.shards import glyph_recipe, text_recipe
from tests.system.processes import ROOT
from tests.trainer.telemetry_reports import NUMBERS, records, telemetry
from trainer.backbone.backbone import build_backbone
from trainer.config import BackboneConfig
from trainer.devices import DEVICES, device_named
from trainer.telemetry.mfu import ModelFlops, Utilization, forward_flops, head_flops, peak_flops

CPU = torch.device("cpu")


def forward_of(config: dict[str, Any], inputs: dict[str, torch.Tensor]) -> float:
    image = ImageConfig() if "pixel_values" in inputs else None
    with torch.device("meta"):
        backbone = build_backbone(BackboneConfig(config=config), image=image)
    return forward_flops(backbone, inputs)


def test_a_resnet50_takes_the_operations_that_its_authors_count():
    pixels = torch.empty(1, 3, 224, 224, dtype=torch.uint8, device="meta")
    counted = forward_of({"model_type": "resnet"}, {"pixel_values": pixels})
    # He et al. 2016, table 1: 3.8e9 multiply-adds; with the stride in the 3 x 3, as here, 4.1e9.
    assert counted == pytest.approx(2 * 4.09e9, rel=0.01)


@pytest.mark.parametrize("length", [8, 128])
def test_a_bert_takes_the_operations_of_its_matrices(length):
    tokens = torch.empty(1, length, dtype=torch.int64, device="meta")
    counted = forward_of({"model_type": "bert"}, {"input_ids": tokens, "attention_mask": tokens})
    layers, dim, wide = 12, 768, 3072
    matrices = 2 * length * (4 * dim * dim + 2 * dim * wide)
    attention = 4 * length * length * dim
    assert counted == layers * (matrices + attention)


@pytest.mark.parametrize("model_type", ["vit", "convnext"])
def test_encoders_of_other_kinds_are_counted(model_type):
    pixels = torch.empty(1, 3, 224, 224, dtype=torch.uint8, device="meta")
    assert forward_of({"model_type": model_type}, {"pixel_values": pixels}) > 1e9


def product(_: Any, left: list[int], right: list[int], **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


@pytest.mark.parametrize("bias", [True, False])
def test_the_heads_formula_is_what_the_engine_computes(bias):
    config = HeadConfig(bias=bias)
    head = build_head(
        config, dim=24, num_classes=50, label_vectors=None, mesh=None, seed=0, device=CPU
    )
    features = torch.randn(6, 24, requires_grad=True)
    # The counter does not know the product that adds to its target in place.
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
def test_only_logits_that_are_made_count(changes, classes):
    counted = head_flops(HeadConfig(bias=False, **changes), dim=10, num_classes=100)
    assert counted == (None if classes is None else 6 * 10 * classes)


def text_flops(texts: Path, run: Path) -> ModelFlops:
    return ModelFlops(text_recipe(texts, run), num_classes=20)


def rows(number: int, length: int) -> dict[str, torch.Tensor]:
    tokens = torch.ones(number, length, dtype=torch.int64)
    return {"input_ids": tokens, "attention_mask": tokens}


def test_the_mfu_is_of_this_ranks_rows_at_the_length_they_have(texts, tmp_path):
    flops = text_flops(texts, tmp_path)
    peak = 1e-3
    with telemetry(tmp_path, flops=flops, peak_tflops=peak, port=0) as report:
        report.beat(1, inputs=rows(3, 8))
        report.beat(2, inputs=rows(5, 16))
        report.step(2, **NUMBERS)
    short, long = flops.per_row(rows(1, 8)), flops.per_row(rows(1, 16))
    assert short is not None
    assert long is not None
    assert long > short
    (step,) = records(tmp_path)
    done = 3 * short + 5 * long
    assert step["mfu"] == pytest.approx(done / (2 * step["step_seconds"]) / (peak * 1e12))


def test_where_no_peak_is_known_there_is_no_mfu(texts, tmp_path):
    flops = text_flops(texts, tmp_path)
    with telemetry(tmp_path, flops=flops) as report:
        report.beat(1, inputs=rows(3, 8))
        report.step(1, **NUMBERS)
    assert "mfu" not in records(tmp_path)[0]


def test_a_head_without_a_formula_has_no_mfu_and_says_so(glyphs, tmp_path):
    factored = {"weights": {"kind": "factored"}, "loss": {"kind": "quadratic"}, "bias": False}
    recipe = glyph_recipe(glyphs, tmp_path, head=factored)
    said: list[str] = []
    utilisation = Utilization(ModelFlops(recipe, 13), 1e12, said.append)
    for _ in range(2):
        utilisation.add({"pixel_values": torch.zeros(2, 1, 16, 16, dtype=torch.uint8)})
    assert utilisation.take(1.0) is None
    assert said == ["no MFU: this head makes no row of logits"]


def test_counting_draws_no_random_numbers(texts, tmp_path):
    before = torch.get_rng_state()
    flops = text_flops(texts, tmp_path)
    flops.per_row(rows(2, 8))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_peak_is_the_recipes_or_the_devices_or_none():
    assert peak_flops(CPU, "bf16", 2.5) == 2.5e12
    assert peak_flops(CPU, "bf16", None) is None


def test_devices_are_known_by_their_whole_name_alone():
    names = [name for device in DEVICES.values() for name in device.names]
    assert len(names) == len({*names})
    assert device_named("NVIDIA H100 80GB HBM3") is DEVICES["h100"]
    assert device_named("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert DEVICES["a100"].peak_flops("bf16") == 312e12
    assert DEVICES["v100"].peak_flops("bf16") is None
    assert DEVICES["a100"].peak_flops("fp32") == 156e12  # of TF32, which convolutions use
    assert DEVICES["v100"].peak_flops("fp32") == 15.7e12


def test_the_table_of_devices_is_free_of_torch():
    code = "import sys, trainer.devices; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
