"""The expected figures for one H100 with 80 GB, computed from its rates."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.gpu.plans import measured_h100, planned_rows, plans_on
from benchmarks.gpu.sizes import FULL, RowsSize
from trainer.devices import DEVICES

# Published throughputs, from which the expected ones are derived. NVIDIA's DeepLearningExamples,
# PyTorch/Classification/ConvNets/resnet50v1.5/README.md: ResNet-50 in mixed precision on one A100.
A100_IMAGES_PER_SECOND = 2470
# Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters, table 1: the
# smallest model, of 1.7 billion parameters, reaches 44% of the peak rate of an A100.
TEXT_MFU = 0.44
# A query for one logit launches a copy of the row, a product and a copy of the result.
LAUNCHES_OF_ONE_LOGIT = 3
SECONDS_PER_LAUNCH = 5e-6

_BF16, _FLOAT32 = 2, 4


@dataclass(frozen=True)
class ExpectedHead:
    """A step of cross-entropy: times in seconds, and memory in bytes without the class weights.

    products: four bare matrix products. planned: the head in `kway plan`, as the sum of
    planned_products and planned_logits. memory: the gradient and the blocks of logits in kway.
    all_logits: the logits in torch's cross-entropy.
    """

    classes: int
    rows: int
    products: float
    planned: float
    planned_products: float
    planned_logits: float
    memory: int
    all_logits: int


@cache
def _plans() -> dict[str, Any]:
    return plans_on(measured_h100(), FULL)


def heads() -> Iterator[ExpectedHead]:
    """Yield the head steps of the benchmark."""
    machine = measured_h100()
    for plan in _plans()["heads"]:
        logits = plan["classes"] * plan["rows"]
        yield ExpectedHead(
            classes=plan["classes"],
            rows=plan["rows"],
            products=4 * 2 * logits * FULL.head_dim / machine.flops["bf16"],
            planned=plan["seconds"],
            planned_products=plan["compute_seconds"],
            planned_logits=plan["memory_seconds"],
            memory=plan["memory_bytes"],
            # The logits in bf16, their copy in float32, and the logarithms of the softmax.
            all_logits=logits * (_BF16 + 2 * _FLOAT32),
        )


def fused() -> Iterator[tuple[RowsSize, float, float, int]]:
    """Yield the heads with fused updates, the seconds of four bare products and of the planned
    head, and the bytes of the planned head with its rows."""
    machine = measured_h100()
    for case in FULL.fused:
        flops = 4 * 2 * case.batch * case.dim * case.classes
        plan = planned_rows(case, machine)
        products = flops / machine.flops["bf16"]
        memory = plan["weight_bytes"] + plan["index_bytes"] + plan["memory_bytes"]
        yield case, products, plan["seconds"], memory


def steps() -> dict[str, dict[str, Any]]:
    """Return the training steps of the benchmark. bound: samples per second at the rates of the
    device. published: samples per second, derived from the published figure."""
    machine, plans = measured_h100(), _plans()
    peak = DEVICES["h100"].peaks["bf16"]
    scale = machine.bandwidth / DEVICES["a100"].memory_bytes_per_second
    flops = plans["texts"]["flops_per_sample"]
    published = {"images": A100_IMAGES_PER_SECOND * scale, "texts": TEXT_MFU * peak / flops}
    inputs = {
        "images": f"{FULL.images.side} x {FULL.images.side}",
        "texts": f"{FULL.texts.tokens} tokens",
    }
    found = {}
    for name, size in (("images", FULL.images), ("texts", FULL.texts)):
        plan, bound = plans[name], size.batch / plans[name]["seconds"]
        found[name] = {
            "inputs": inputs[name],
            "batch": size.batch,
            "flops_per_sample": plan["flops_per_sample"],
            "bound": bound,
            "published": published[name],
            "mfu": min(bound, published[name]) * plan["flops_per_sample"] / peak,
            "memory": plan["memory_bytes"],
        }
    return found


def queries() -> Iterator[tuple[int, int, float, float]]:
    """Yield (classes, rows, seconds of one logit, seconds of all logits) of queries in float32."""
    machine = measured_h100()
    for classes in FULL.serving_classes:
        for rows in FULL.serving_rows:
            moved = _FLOAT32 * classes * (FULL.head_dim + rows) / machine.bandwidth
            products = 2 * classes * rows * FULL.head_dim / machine.flops["fp32"]
            one = LAUNCHES_OF_ONE_LOGIT * SECONDS_PER_LAUNCH
            yield classes, rows, one, max(moved, products) + one
