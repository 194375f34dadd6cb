"""Drift of the share of passing inputs, and the log of queries."""

import json
from pathlib import Path

import httpx
import numpy as np
import pytest
from scipy import stats

from serving.client import Client
from serving.drift import FALSE_ALARMS, DriftMonitor, expected_passes
from serving.query_log import QueryLog
from serving.schemas import Answer, ClassDrift, ClassThreshold, InputVerdicts, Verdict
from tests.serving.in_process import application, listening
from tests.serving.page_driver import image
from tests.serving.watching import frames, send_frames
from tests.tiny_bundle import write


@pytest.mark.parametrize(
    ("inputs", "before"), [(100, (5, 100)), (1000, (30, 1000)), (130, (0, 100)), (80, (60, 100))]
)
def test_the_expected_passes_are_those_of_fishers_exact_test(inputs, before):
    passed_before, inputs_before = before
    low, high = expected_passes(inputs, *before)
    for passed in range(inputs + 1):
        table = [
            [passed, inputs - passed],
            [passed_before, inputs_before - passed_before],
        ]
        sides = [stats.fisher_exact(table, side).pvalue for side in ("less", "greater")]
        assert (low <= passed <= high) == (min(sides) > FALSE_ALARMS / 2)


@pytest.mark.parametrize("share", [0.001, 0.05, 0.5])
def test_the_probability_of_a_false_alarm_is_at_most_the_stated_one(share):
    num = 500
    passes = np.arange(num + 1)
    probability = stats.binom.pmf(passes, num, share)
    total = 0.0
    for before in passes[probability > 1e-12]:
        low, high = expected_passes(num, int(before), num)
        is_outside = (passes < low) | (passes > high)
        total += probability[before] * probability[is_outside].sum()
    assert total <= FALSE_ALARMS


def test_each_period_is_compared_with_the_first():
    found: list[ClassDrift] = []
    monitor = DriftMonitor(200, found.append)
    rng = np.random.default_rng(0)
    for share in (0.1, 0.1, 0.1, 0.4, 0.1):
        for passes in rng.random(200) < share:
            monitor.add_frame([(3, 1.5), (4, 1.5)], {(3, 1.5)} if passes else set())
    of_three = [each for each in found if each.class_id == 3]
    assert [each.has_drifted for each in of_three] == [False, False, True, False]
    assert not any(each.has_drifted for each in found if each.class_id == 4)
    assert monitor.of(3, 1.5) == of_three[-1]
    assert monitor.of(3, 1.0) is None
    assert monitor.num_monitored() == (2, 0)
    low, high = of_three[0].expected_interval
    assert low < of_three[0].pass_share < high


def test_only_the_most_recently_used_classes_are_monitored():
    monitor = DriftMonitor(100, lambda period: None)
    for class_id in range(10_001):
        for _ in range(100 if class_id == 0 else 1):
            monitor.add_frame([(class_id, 0.0)], ())
    assert monitor.num_monitored() == (0, 0)  # class 0, the only one with a reference, was removed


def test_a_watch_reports_drift(tmp_path: Path) -> None:
    """All frames pass in the first period, and none in the second."""
    bundle = write(tmp_path / "pets")
    with (
        listening(application(bundle, drift_period=100)) as url,
        Client(url) as client,
        httpx.Client(base_url=url, timeout=30) as feeds,
    ):
        probe = client.query([2], [image(0), image(1)], threshold=0.0)
        scores = [result.verdicts[0].score for result in probe.results]
        better, worse = (image(0), image(1)) if scores[0] > scores[1] else (image(1), image(0))
        threshold = sum(scores) / 2
        watch = client.create_watch([2], threshold=threshold, ttl_seconds=60)
        assert watch.drift == []
        send_frames(feeds, frames([better] * 100))
        assert client.watches()[0].drift == []
        send_frames(feeds, frames([worse] * 100))
        (drift,) = client.watches()[0].drift
    assert drift.class_id == 2
    assert (drift.inputs, drift.pass_share, drift.has_drifted) == (100, 0.0, True)
    assert drift.expected_interval[0] > 0.5


def test_the_query_log_contains_only_numbers(tmp_path: Path) -> None:
    log = tmp_path / "log"
    bundle = write(tmp_path / "pets")
    app = application(bundle, query_log=log, drift_period=100)
    with listening(app) as url, Client(url) as client:
        answer = client.query([2, 6], [image(0), image(1)], recall=0.9)
        client.query([2], [image(0)])  # without a threshold
        for _ in range(4):
            client.query([2], [image(0)] * 50, threshold=1.0)
    service = app.state.resources.of().service
    service.shared.close()
    lines = [json.loads(line) for line in (log / "queries-0.jsonl").read_text().splitlines()]
    passed = [
        sum(bool(result.verdicts[column].match) for result in answer.results) for column in (0, 1)
    ]
    first = {name: value for name, value in lines[0].items() if name != "time"}
    assert first == {
        "model": "pets",
        "version": service.version,
        "classes": [2, 6],
        "thresholds": [2.0, 0.5],
        "inputs": 2,
        "passed": passed,
    }
    assert len(lines) == 1 + 4 + 1
    (period,) = [line["drift"] for line in lines if "drift" in line]
    assert (period["class_id"], period["has_drifted"]) == (2, False)


def answer_of(num: int) -> Answer:
    verdict = Verdict(
        class_name="a", class_id=0, score=1.0, threshold=0.0, threshold_source="request", match=True
    )
    threshold = ClassThreshold(
        class_name="a", class_id=0, threshold=0.0, threshold_source="request"
    )
    results = [InputVerdicts(input=i, verdicts=[verdict]) for i in range(num)]
    return Answer(aligned=True, notice=None, thresholds=[threshold], results=results)


def test_the_query_log_is_bounded_and_each_replica_has_its_own_file(tmp_path: Path) -> None:
    first, second = QueryLog(tmp_path, most_bytes=1000), QueryLog(tmp_path)
    for _ in range(100):
        first.of_model("pets", "1").add_answer(answer_of(1))
    second.of_model("pets", "1").add_answer(answer_of(2))
    second.close()
    again = QueryLog(tmp_path)  # a restarted replica continues its file
    again.of_model("pets", "1").add_answer(answer_of(3))
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.jsonl*")}
    assert sorted(sizes) == ["queries-0.jsonl", "queries-0.jsonl.1", "queries-1.jsonl"]
    assert max(sizes["queries-0.jsonl"], sizes["queries-0.jsonl.1"]) <= 1000
    lines = (tmp_path / "queries-1.jsonl").read_text().splitlines()
    assert [json.loads(line)["inputs"] for line in lines] == [2, 3]
    for log in (first, again):
        log.close()


def test_a_query_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        QueryLog(tmp_path / "file")
