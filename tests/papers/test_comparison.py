"""The search of learning rates, and claims from the runs at the best rates."""

from collections.abc import Mapping, Sequence

import pytest

from experiments.papers.comparison import Compared, more_rates, search
from experiments.papers.job import Job, Result
from experiments.papers.page import Status, status
from experiments.papers.section import PUBLISHED


def searched(
    best: Mapping[str, float], limits: tuple[float, float]
) -> dict[str, dict[float, float]]:
    """Search with invented values that are highest at the rate `best` of each arm."""

    def jobs(arm: str, rates: Sequence[float]) -> list[Job]:
        return [Job("stacked_mlp:train", {"arm": arm, "rates": list(rates)})]

    def value(arm: str, rate: float) -> float:
        return 1 / max(rate / best[arm], best[arm] / rate)

    def read(results: Sequence[Result]) -> list[float]:
        return list(results[0]["values"])

    procedure = search(list(best), jobs, read, rates=(0.1, 0.32), limits=limits)
    asked = next(procedure)
    while True:
        results = {}
        for job in asked:
            values = [value(job.settings["arm"], rate) for rate in job.settings["rates"]]
            results[job] = Result({"values": values}, 1.0)
        try:
            asked = procedure.send(results)
        except StopIteration as end:
            found: dict[str, dict[float, float]] = end.value
            return found


@pytest.mark.parametrize("best", [0.1, 0.01, 3.2])
def test_a_search_adds_rates_until_both_neighbors_are_worse(best: float) -> None:
    (values,) = searched({"ce": best}, (1e-6, 1e3)).values()
    ordered = sorted(values)
    chosen = max(values, key=values.__getitem__)
    assert chosen == best
    assert ordered[0] < chosen < ordered[-1]


def test_a_search_ends_at_its_limits() -> None:
    assert more_rates({1e-6: 0.9, 1.0: 0.5}, (1e-6, 1e3)) == []
    assert more_rates({0.1: 0.5, 1.0: 0.9}, (1e-6, 1e3)) == [3.2, 10.0]
    assert more_rates({0.1: 0.9, 1.0: 0.5}, (1e-6, 1e3)) == [0.032, 0.01]


def test_a_claim_whose_best_rate_is_at_an_edge_settles_nothing() -> None:
    inside, edge = {0.1: 0.5, 0.32: 0.9, 1.0: 0.5}, {0.1: 0.5, 0.32: 0.9}
    runs = {"a": [{"top1": 0.9}, {"top1": 0.8}], "b": [{"top1": 0.5}, {"top1": 0.41}]}
    for searches, expected in (
        ({"a": inside, "b": inside}, Status.REPRODUCED),
        ({"a": inside, "b": edge}, Status.NOT_SETTLED),
    ):
        found = Compared(searches, runs)
        claim = found.claim("a beats b", found.gain("a", "b", "top1"), "a", "b")
        assert claim.verdict == "holds"
        assert status([claim], PUBLISHED) is expected


def test_a_run_that_diverged_has_the_value_zero() -> None:
    diverged = [{"diverged": "a loss is inf"}, {"top1": None}]
    nested = [{"test": {"top1": 0.25}}]
    found = Compared({}, {"a": diverged, "b": nested})  # type: ignore[dict-item]
    assert found.values("a", "top1") == [0.0, 0.0]
    assert found.values("b", "test/top1") == [0.25]
