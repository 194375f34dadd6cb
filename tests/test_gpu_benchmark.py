"""`python -m benchmarks.gpu` at toy size: its results, how it resumes and fails, and its page."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.page import page_text
from benchmarks.gpu.sizes import TOY, Size
from benchmarks.gpu.slices import Slice, key_of, run_slices, slices_of, stored
from benchmarks.gpu.tasks import IMAGES, task_of
from benchmarks.gpu.training import trace_steps

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a complete run at toy size."""
    folder = tmp_path_factory.mktemp("gpu")
    assert main(["--out", str(folder), "--toy"]) == 0
    return folder


def result(folder: Path, name: str) -> dict[str, Any]:
    record = stored(folder, name)
    assert record is not None
    assert record.keys() == {"key", "seconds", "machine", "result"}
    return record["result"]


@pytest.mark.slow
def test_a_slice_has_a_result_and_a_page_of_results_is_written(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--toy", "--slice", "serving-100"]) == 0
    assert result(tmp_path, "serving-100")
    assert (tmp_path / "gpu.md").exists()


@pytest.mark.slow
def test_every_slice_has_a_result(results: Path) -> None:
    for each in slices_of(TOY):
        assert result(results, each.name)


@pytest.mark.slow
def test_losses_collectives_and_checkpoints_are_correct(results: Path) -> None:
    losses = result(results, "losses")
    assert losses["num_cases"] == 5 * 6 * 2 * 3  # precisions, logit maps, losses, class weights
    for name in ("losses", "collectives", "checkpoint"):
        assert result(results, name)["wrong"] == []


@pytest.mark.slow
def test_deferred_steps_under_ddp_and_fsdp_do_not_synchronize(results: Path) -> None:
    cases = result(results, "synchronizations")["cases"]
    assert {(case["strategy"], case["loss"]) for case in cases} == {
        (strategy, loss) for strategy in ("ddp", "fsdp") for loss in ("ce", "batch_ce")
    }
    for case in cases:
        assert case["synchronizations_per_step"] == 0, case["sites"]
        assert case["launches_per_step"] > 0


def test_a_synchronous_step_synchronizes_at_the_gradient_norm() -> None:
    """If no call site were found here, the test above could not fail."""
    changes = {"train": {"synchronous": True}}
    sites = trace_steps(task_of(IMAGES, TOY.tiny, CPU, changes), 2).synchronizations()
    assert any("trainer/task.py" in site and "clip_gradients" in site for site in sites), sites


@pytest.mark.slow
@pytest.mark.parametrize("name", ["images", "texts"])
def test_steps_are_compared_with_a_bare_loop(name: str, results: Path) -> None:
    step = result(results, name)
    assert step["samples_per_second"].keys() == {"trainer", "bare loop"}
    assert step["ratio"] > 0
    assert step["flops_per_sample"] > 0
    assert step["mfu"] is step["idle_share"] is None  # known only on a GPU


@pytest.mark.slow
def test_all_heads_compute_the_same_loss_and_gradients(results: Path) -> None:
    for classes in TOY.head_classes:
        found = result(results, f"head-{classes}-{TOY.head_rows[0]}")["contenders"]
        assert found.keys() >= {"kway", "torch cross_entropy", "bare products"}
        for name, each in found.items():
            assert each["seconds"] > 0
            if name != "bare products":
                assert max(each["errors"].values()) < 0.01, name


@pytest.mark.slow
def test_a_complete_slice_runs_again_only_if_its_key_changes(results: Path, capfd) -> None:
    path = results / "serving-100.json"
    record = json.loads(path.read_bytes())
    record["key"]["code"] = "other"
    path.write_text(json.dumps(record))
    assert main(["--out", str(results), "--toy"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if "about" in line] == ["serving-100: about 1 s …"]
    assert json.loads(path.read_bytes())["key"] == key_of(TOY, CPU)


def raises(size: Size, device: torch.device) -> dict[str, Any]:
    raise ValueError("the kernel is wrong")


def dies(size: Size, device: torch.device) -> dict[str, Any]:
    os._exit(3)


def finds_a_wrong_result(size: Size, device: torch.device) -> dict[str, Any]:
    return {"wrong": ["ce"]}


def hangs(size: Size, device: torch.device) -> dict[str, Any]:
    time.sleep(1000)
    return {}


def works(size: Size, device: torch.device) -> dict[str, Any]:
    return {"device": device.type}


def test_the_slices_after_a_failure_run_and_the_failure_is_recorded(tmp_path: Path) -> None:
    slices = [Slice("raises", raises, 1), Slice("dies", dies, 1), Slice("works", works, 1)]
    assert not run_slices(slices, tmp_path, TOY, CPU, seconds=60)
    errors = [(stored(tmp_path, each.name) or {}).get("error") for each in slices]
    assert errors[0] == "ValueError: the kernel is wrong"
    assert "exit code 3" in errors[1]
    assert result(tmp_path, "works") == {"device": "cpu"}
    assert "Traceback" in (tmp_path / "raises.log").read_text()
    slices = [Slice("raises", works, 1), *slices[2:]]
    assert run_slices(slices, tmp_path, TOY, CPU, seconds=60)
    assert result(tmp_path, "raises") == {"device": "cpu"}


def test_a_wrong_result_is_a_failure_in_the_first_run_and_in_later_runs(tmp_path: Path) -> None:
    slices = [Slice("wrong", finds_a_wrong_result, 1)]
    for _ in range(2):
        assert not run_slices(slices, tmp_path, TOY, CPU, seconds=60)


def test_a_slice_that_hangs_is_stopped_and_one_that_is_too_long_does_not_start(tmp_path, capfd):
    slices = [Slice("long", works, 100), Slice("hangs", hangs, 1), Slice("last", works, 1)]
    assert not run_slices(slices, tmp_path, TOY, CPU, seconds=1.5)
    assert "not done after" in (stored(tmp_path, "hangs") or {})["error"]
    assert stored(tmp_path, "long") is stored(tmp_path, "last") is None
    assert "no time for long, last" in capfd.readouterr().out


@pytest.mark.slow
def test_the_page_of_results_shows_failures_and_all_measurements(results: Path, tmp_path) -> None:
    for path in results.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    record = stored(results, "texts") or {}
    del record["result"]
    (tmp_path / "texts.json").write_text(json.dumps(record | {"error": "ValueError: no"}))
    assert main(["--out", str(tmp_path), "--page", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert page.startswith("# GPU measurements: no GPU has been measured\n")
    assert "- `texts`: ValueError: no" in page
    for section in ("Losses", "Synchronizations", "Measured steps", "Measured heads"):
        assert f"### {section}\n" in page
    for name in ("heads", "serving"):
        assert f"(gpu/{name}.png)" in page
        assert (tmp_path / "gpu" / f"{name}.png").stat().st_size > 10_000


def test_the_committed_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    command = "python -m benchmarks.gpu --page docs/gpu.md"
    assert page == page_text({}, []), f"docs/gpu.md is outdated: run {command}"


def test_the_wheels_are_those_that_kway_is_tested_with() -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    lines = (ROOT / "benchmarks" / "gpu" / "wheels.txt").read_text().splitlines()
    wheels = [line for line in lines if not line.startswith("#")]
    peers = [wheel for wheel in wheels if wheel not in constraints]
    assert [peer.partition("==")[0] for peer in peers] == ["cut-cross-entropy", "liger-kernel"]
