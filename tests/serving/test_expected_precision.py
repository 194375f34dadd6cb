"""Answers report what a threshold promises, and its expected precision."""

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

from serving.client import Client
from tests.noise_images import image
from tests.serving.in_process import application, listening
from tests.serving.started import ask as ask_command
from tests.tiny_bundle import write_of_format_2

# Class 2 has a guaranteed threshold; class 6 uses the pooled one.
RATES = np.array([[0.95, 0.91, 1.0], [0.9, 0.7, 0.98]], np.float32).tolist()
OWN = {
    "class": "samoyed",
    "class_id": 2,
    "threshold": 2.0,
    "threshold_source": "guaranteed",
    "reason": None,
    "recall": 0.9,
    "confidence": 0.9,
    "pass_rate": RATES[0][0],
    "pass_rate_interval": (RATES[0][1], RATES[0][2]),
    "expected_precision": 5 / 8,
    "expected_precision_interval": pytest.approx(binomtest(5, 8).proportion_ci(0.9, "wilson")),
    "classes_below_recall": None,
    "class_samples": 5,
    "class_reached": 5,
    "all_reached": 8,
}
POOLED = {
    "class": "7",
    "class_id": 6,
    "threshold": 0.5,
    "threshold_source": "pooled",
    "reason": None,
    "recall": 0.9,
    "confidence": 0.9,
    "pass_rate": RATES[1][0],
    "pass_rate_interval": (RATES[1][1], RATES[1][2]),
    "expected_precision": None,
    "expected_precision_interval": None,
    "classes_below_recall": 0.25,
    "class_samples": 0,
    "class_reached": 0,
    "all_reached": 4,
}


def test_an_answer_reports_precision_once_per_class_and_in_each_verdict(bundle: Path) -> None:
    with listening(application(bundle)) as url, Client(url) as client:
        answer = client.query([2, 6], [image(0), image(1)], recall=0.9)
    assert [one.model_dump() for one in answer.thresholds] == [OWN, POOLED]
    for result in answer.results:
        assert [one.expected_precision for one in result.verdicts] == [5 / 8, None]


def test_precision_is_unknown_for_a_bundle_from_an_older_version(tmp_path: Path) -> None:
    bundle = write_of_format_2(tmp_path / "old")
    with listening(application(bundle)) as url, Client(url) as client:
        answer = client.query([2, 6], [image(0)], recall=0.9)
    assert [one.threshold_source for one in answer.thresholds] == ["empirical", "pooled"]
    known = ("class", "class_id", "threshold", "class_samples")
    for one, expected in zip(answer.thresholds, (OWN, POOLED), strict=True):
        found = one.model_dump()
        assert {name: found[name] for name in known} == {name: expected[name] for name in known}
        assert (one.pass_rate, one.pass_rate_interval) == (None, None)
        assert (one.expected_precision, one.class_reached, one.all_reached) == (None, None, None)
    (file := tmp_path / "1.png").write_bytes(image(0))
    shown = ask_command(bundle, "--class", "7", "--recall", 0.9, file)
    assert "expected precision unknown" in shown
