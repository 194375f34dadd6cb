"""Beyond the papers: heads sharded over several ranks compared with the same heads on one rank."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from safetensors.numpy import load_file

from experiments.papers.budget import Budget
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.experiments.sharded_ranks import MEASURES, SETTINGS, measure, rows_file
from experiments.papers.job import Folders, Job, Measures
from experiments.papers.section import Claim, Kind, Section, Table, Verdict
from experiments.papers.turns import Median, median
from trainer.world import World

_JOB = "experiments.beyond_sharded:compare_meshes"
_REPOSITORY = Path(__file__).parents[3]
_RANKS = "experiments.papers.experiments.sharded_ranks"
# Number of ranks, and number of ranks that the classes are sharded across: a mesh is data x class.
_MESHES = {"2 ranks share the classes": (2, 2), "2 ranks share the rows": (2, 1)}
_ALONE, _TOGETHER = "1 rank", "1 rank with 2 threads"
_LOSSES = (
    *("ce", "batch_ce", "max_margin", "batch_max_margin", "self_norm", "nce", "bce", "softmax_cs"),
    *("sigmoid_cs", "softmax_tanimoto", "sigmoid_tanimoto", "topk_hinge", "smooth_topk"),
    *("quadratic", "ccql", "taylor_softmax", "spherical_softmax", "spherical_bound", "simloss"),
)
_FACTORED = ("quadratic", "ccql", "taylor_softmax", "spherical_softmax", "spherical_bound")
_CASES = (
    *(f"{weights} {loss}" for weights in ("dense", "vtree", "utree") for loss in _LOSSES),
    *(f"factored {loss}" for loss in _FACTORED),
)
# Relative rounding error if float32 sums are computed in a different order.
_ROUNDING = 1e-4


def compare_meshes(settings: Mapping[str, Any], folders: Folders) -> Measures:
    """Compare losses and rows of each case with those of one rank, and time a larger head (a job).

    Differences are relative. Times are measured for each mesh, whose ranks have one thread each,
    and for one rank with one and with two threads.
    """
    alone, rows_alone = _of_one_rank(settings, threads=1)
    together, _ = _of_one_rank({**settings, "cases": []}, threads=2)
    found: Measures = {
        _ALONE: {"seconds": alone["seconds"]},
        _TOGETHER: {"seconds": together["seconds"]},
    }
    for mesh in settings["meshes"]:
        num_ranks, class_group = _MESHES[mesh]
        folder = folders.work / mesh.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        (folder / SETTINGS).write_text(json.dumps({**settings, "class_group": class_group}))
        _start(folder, num_ranks)
        measures = json.loads((folder / MEASURES).read_text())
        rows = _rows(folder, num_ranks, settings["cases"])
        found[mesh] = {
            "seconds": measures["seconds"],
            "losses": {
                case: relative_difference(losses, alone["losses"][case])
                for case, losses in measures["losses"].items()
            },
            "rows": {
                case: relative_difference(ours, rows_alone[case]) for case, ours in rows.items()
            },
        }
    return found


def _of_one_rank(
    settings: Mapping[str, Any], *, threads: int
) -> tuple[Measures, dict[str, np.ndarray]]:
    """Return measures and rows of a single rank in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        world = World(0, 1, 0, 1, torch.device("cpu"), None)
        measures, rows = measure(settings, world)
    finally:
        torch.set_num_threads(before)
    return measures, joined([rows], settings["cases"])


def _start(folder: Path, num_ranks: int) -> None:
    command = [sys.executable, "-m", _RANKS, str(folder), "--launch", str(num_ranks)]
    ended = subprocess.run(
        command,
        # Ranks need this path: an installed kway does not contain experiments, and ranks do not
        # import from the working directory.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise ChildProcessError(
            f"{num_ranks} ranks exited with code {ended.returncode}: {ended.stderr}"
        )


def _rows(folder: Path, num_ranks: int, cases: Sequence[str]) -> dict[str, np.ndarray]:
    return joined([load_file(folder / rows_file(rank)) for rank in range(num_ranks)], cases)


def joined(
    ranks: Sequence[Mapping[str, np.ndarray]], cases: Sequence[str]
) -> dict[str, np.ndarray]:
    """Return the rows [K, d] of all ranks by case, in the order of classes."""
    found = {}
    for case in cases:
        ids = np.concatenate([rank[f"{case} ids"] for rank in ranks])
        # Several ranks may have the row of the same class; use the row from the lowest rank.
        _, first = np.unique(ids, return_index=True)
        found[case] = np.concatenate([rank[f"{case} rows"] for rank in ranks])[first]
    return found


def relative_difference(ours: Any, theirs: Any) -> float:
    """Return the largest absolute difference relative to the largest absolute value of `theirs`."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    toy = budget.is_toy
    large = budget.size(50_000, full=1_000_000, least=10_000)
    job = Job(
        _JOB,
        {
            "cases": ["dense ce", "vtree batch_ce", "factored quadratic"] if toy else list(_CASES),
            "meshes": list(_MESHES)[:1] if toy else list(_MESHES),
            "classes": 103,
            "dim": 16,
            "batch": 33,  # neither is divisible by the number of ranks
            "steps": 3 if toy else 10,
            # At a learning rate of 0.5, ten steps of spherical softmax on trees turn a change of
            # 1e-7 into one of 1e-2 even on one rank, so the differences would be due to the loss,
            # not to sharding.
            "rate": 0.01,
            "timed": {
                "classes": large,
                "dim": 8 if toy else 128,
                "batch": 8 if toy else 256,
                "steps": 3 if toy else budget.size(20, full=50, least=8),
            },
        },
        alone=True,
    )
    results = yield [job]
    return _section(job, results[job].measures, plots)


def _section(job: Job, measures: Measures, plots: PlotFolder) -> Section:
    settings, large = job.settings, job.settings["timed"]
    times = {mesh: median(found["seconds"]) for mesh, found in measures.items()}
    case = f"{large['classes']:,} classes, d = {large['dim']}, {large['batch']} rows"
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=(
            f"This experiment tests {len(settings['cases'])} combinations of class weights and "
            f"loss, with {settings['classes']} classes and a batch of {settings['batch']} rows: "
            "neither number is divisible by the number of ranks. Each head is trained on noise "
            f"for {settings['steps']} steps of SGD with a rate of {settings['rate']:g}. Every "
            "mesh starts from the same class rows and uses the same global batches. Ranks are CPU "
            "processes with one thread each, started by kway's launcher (gloo). Step times are "
            f"for dense ce with {case}."
        ),
        claims=[*_same_claims(measures), _faster_claim(times, case)],
        tables=[_apart_table(measures), _times_table(times, case)],
        plots=[
            plots.save(
                EXPERIMENT.name,
                _figure(measures),
                title="Relative difference between the rows of sharded heads and those of one "
                "rank after all steps.",
                alt_text="One point per combination of class weights and loss, and a line for "
                "rounding.",
            )
        ],
        remarks=[
            "The ranks share the memory and cores of one machine. The comparison with one rank "
            "that has the same number of threads shows the cost of sharding on one machine, not "
            "the benefit of several machines. The meshes were measured one after the other."
        ],
    )


def _same_claims(measures: Measures) -> list[Claim]:
    claims = []
    for mesh in _sharded(measures):
        worst = {what: _worst(measures[mesh][what]) for what in ("losses", "rows")}
        same = all(value <= _ROUNDING for _, value in worst.values())
        shown = "; ".join(f"{what} {value:.0e} ({case})" for what, (case, value) in worst.items())
        claims.append(
            Claim(
                f"if {mesh}, losses and class rows equal those of one rank up to rounding "
                f"({_ROUNDING:.0e})",
                "holds" if same else "does not hold",
                f"largest relative difference: {shown}",
                Kind.ADDITIONAL,
            )
        )
    return claims


def _sharded(measures: Measures) -> list[str]:
    return [mesh for mesh in measures if mesh in _MESHES]


def _kinds(measures: Measures) -> list[str]:
    """Return the kinds of class weights."""
    first = measures[_sharded(measures)[0]]["losses"]
    return list(dict.fromkeys(case.split()[0] for case in first))


def _worst(apart_by_case: Mapping[str, float]) -> tuple[str, float]:
    case = max(apart_by_case, key=apart_by_case.__getitem__)
    return case, apart_by_case[case]


def _faster_claim(times: Mapping[str, Median], case: str) -> Claim:
    one, two = times[_TOGETHER], times[next(iter(_MESHES))]
    verdict: Verdict = "not settled"
    if two.high < one.low:
        verdict = "holds"
    elif two.low > one.high:
        verdict = "does not hold"
    return Claim(
        f"2 ranks that share the classes are faster than 1 rank with 2 threads ({case})",
        verdict,
        f"{_ms(two)} vs. {_ms(one)} ms (median with its interval)",
        Kind.ADDITIONAL,
    )


def _ms(seconds: Median) -> str:
    value, low, high = (1e3 * each for each in (seconds.value, seconds.low, seconds.high))
    return Median(value, low, high, seconds.n).text(0)


def _apart_table(measures: Measures) -> Table:
    """Return a table of the loss with the largest difference for each kind of class weights."""
    rows = []
    for weights in _kinds(measures):
        for mesh in _sharded(measures):
            cells = [weights, mesh]
            for what in ("losses", "rows"):
                of_weights = {
                    case: value
                    for case, value in measures[mesh][what].items()
                    if case.startswith(f"{weights} ")
                }
                case, value = _worst(of_weights)
                cells.append(f"{value:.1e} ({case.split()[1]})")
            rows.append([*cells, str(len(of_weights))])
    return Table(
        "Largest relative difference from one rank, and the loss with which it occurs",
        [
            "class weights",
            "mesh",
            "losses of all steps",
            "rows after the last step",
            "losses tried",
        ],
        rows,
    )


def _times_table(times: Mapping[str, Median], case: str) -> Table:
    rows = [[mesh, _ms(seconds), str(seconds.n)] for mesh, seconds in times.items()]
    return Table(f"ms per step with {case}", ["mesh", "median", "steps"], rows)


def _figure(measures: Measures) -> Figure:
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    kinds = _kinds(measures)
    styles = zip("os", ("tab:blue", "tab:orange"), strict=True)
    for shift, mesh, (marker, color) in zip(
        (-0.15, 0.15), _sharded(measures), styles, strict=False
    ):
        values = measures[mesh]["rows"]
        positions = [kinds.index(case.split()[0]) + shift for case in values]
        # Identical values have a difference of 0, which a logarithmic axis cannot show.
        heights = [max(value, np.finfo(np.float32).eps / 10) for value in values.values()]
        axes.plot(positions, heights, marker, color=color, mfc="none", label=mesh)
    axes.axhline(_ROUNDING, linestyle="--", color="gray", label="rounding tolerance")
    axes.set_yscale("log")
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set_xlabel("class weights (one point per loss)")
    axes.set_ylabel("relative difference of the rows")
    axes.legend()
    return figure


EXPERIMENT = Experiment(
    name="beyond-sharded",
    paper="beyond",
    title="Sharded heads compared with one rank",
    minutes=1,
    full="a million classes per step",
    procedure=_procedure,
)
