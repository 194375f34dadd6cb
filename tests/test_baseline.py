"""`python -m tests.baseline` finds changes, and explains only those that are accepted."""

import json
from typing import Any

import numpy as np
import pytest

from tests.baseline.__main__ import ACCEPTED, RECORDED, accepted, report
from tests.baseline.sections import SECTIONS
from tests.baseline.values import differences, digest, exact, near, read, summary


def changes(was: Any, now: Any, *, tolerance: float = 1e-3, bits: bool = False) -> list[str]:
    record, found = ({"key": near(value, tolerance)} for value in (was, now))
    return [what for _, what in differences(record, found, bits=bits)]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (1.0, 1.01),
        ([1.0, 2.0], [1.0]),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        (1, True),
        ([1.0, 2.0], [1.0, float("inf")]),
        ([float("inf"), 1.0], [float("inf"), 2.0]),
        ({"a": None}, {}),
        ([{"a": [1.0]}], [{"a": [2.0]}]),
    ],
    ids=str,
)
def test_a_change_is_found(was: Any, now: Any) -> None:
    assert changes(was, now)


def test_a_new_member_that_is_null_is_no_change() -> None:
    assert not changes({"a": {}}, {"a": {"b": None}})
    assert changes({"a": {"b": None}}, {"a": {}})


@pytest.mark.parametrize(
    ("was", "now"),
    [(1.0, 1.0005), ([100.0, 1.0], [100.0, 1.05]), (0.0, 1e-7), (float("nan"), float("nan"))],
    ids=str,
)
def test_rounding_is_not_a_change_unless_bits_are_compared(was: Any, now: Any) -> None:
    assert changes(was, now) == []
    assert len(changes(was, now, bits=True)) == (json.dumps(was) != json.dumps(now))


def test_exact_values_have_no_tolerance() -> None:
    assert list(differences({"key": exact(1.0)}, {"key": exact(1.0 + 1e-9)}, bits=False))


def test_a_missing_and_a_new_entry_are_found() -> None:
    found = dict(differences({"old": exact(1)}, {"new": exact(1)}, bits=False))
    assert found.keys() == {"old", "new"}


def test_a_changed_or_moved_number_changes_the_summary() -> None:
    numbers = np.arange(12.0).reshape(3, 4)
    assert not np.allclose(summary(numbers), summary(numbers.T), rtol=1e-3)
    assert not np.allclose(summary(numbers), summary(-numbers), rtol=1e-3)
    assert digest(b"ab") != digest(b"ba")


def test_only_explained_differences_pass(capsys: pytest.CaptureFixture[str]) -> None:
    found = [("runs/state", "was 1, now 2"), ("runs/losses", "was 1, now 2")]
    assert report(found, {"runs/*": "a reason"}) == 0
    assert report(found, {"runs/state": "a reason"}) == 1
    assert report([], {"runs/state": "a reason"}) == 1  # the line explains nothing
    assert report([], {}) == 0
    assert "a reason" in capsys.readouterr().out


def test_every_accepted_line_has_a_reason() -> None:
    accepted(ACCEPTED.read_text(encoding="utf-8"), SECTIONS)
    for line in ("runs/state:", "runz/state: a typing error", "*/state: all sections"):
        with pytest.raises(ValueError, match="reason"):
            accepted(f"{line}\n", SECTIONS)


def test_every_section_is_recorded() -> None:
    assert {path.stem for path in RECORDED.glob("*.json")} == set(SECTIONS)
    assert all(len(read(RECORDED / f"{section}.json")) > 50 for section in SECTIONS)
