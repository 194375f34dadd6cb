"""Write docs/gpu.md from the results, or from the expected figures if no GPU was measured."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import expected
from benchmarks.gpu.figures import Records, sized_results, write_figures
from benchmarks.gpu.plans import measured_h100
from data.files import commit

_TEMPLATES = Path(__file__).parent
_NOT_MEASURED = "# GPU measurements: no GPU has been measured"
_INTRODUCTION = "This page contains the expected figures and the command that measures them."
_NAMES = {"images": "ResNet-50", "texts": "multilingual BERT"}


def write_page(path: Path, records: Records) -> None:
    """Write the page of these records, and its figures to the folder `gpu` next to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = write_figures(path.parent / "gpu", records) if records else []
    commit(path, page_text(records, drawn).encode())


def page_text(records: Records, drawn: Sequence[str]) -> str:
    """Return the page as Markdown. `drawn` contains the file names of its figures."""
    devices = {each["key"]["device"] for each in records.values() if each["key"]["size"] == "full"}
    return (
        _template("page").format(
            title=f"# GPU measurements: {', '.join(sorted(devices))}" if devices else _NOT_MEASURED,
            results="\n\n".join(measured_text(records, drawn)) if records else _INTRODUCTION,
            expected=expected_text(),
        )
        + "\n"
    )


def expected_text() -> str:
    """Return the expected figures as Markdown."""
    machine = measured_h100()
    return _template("expected").format(
        bandwidth=machine.bandwidth / 1e12,
        half=machine.flops["bf16"] / 1e12,
        dim=expected.FULL.head_dim,
        heads=_expected_heads(),
        fused=_expected_fused(),
        steps=_expected_steps(),
        queries=_expected_queries(),
        images=expected.A100_IMAGES_PER_SECOND,
        mfu=expected.TEXT_MFU,
        launches=expected.LAUNCHES_OF_ONE_LOGIT,
    )


def _template(name: str) -> str:
    return (_TEMPLATES / f"{name}.md").read_text(encoding="utf-8").rstrip("\n")


def _expected_heads() -> str:
    head = ("classes", "batch", "products", "kway", "kway's memory", "torch's logits")
    rows = (
        (
            f"{each.classes:,}",
            f"{each.rows:,}",
            _time(each.products),
            f"{_time(each.planned)} (products {_time(each.planned_products)}, logits "
            f"{_time(each.planned_logits)})",
            _gb(each.memory),
            _gb(each.all_logits),
        )
        for each in expected.heads()
    )
    return _table(head, rows)


def _expected_fused() -> str:
    head = ("rows", "classes", "features", "batch", "products", "kway", "memory")
    rows = (
        (
            case.dtype,
            f"{case.classes:,}",
            str(case.dim),
            f"{case.batch:,}",
            _time(products),
            _time(planned),
            _gb(memory),
        )
        for case, products, planned, memory in expected.fused()
    )
    return _table(head, rows)


def _expected_steps() -> str:
    head = ("model", "batch", "GFLOP per sample", "bound", "published", "MFU", "memory")
    rows = (
        (
            f"{_NAMES[name]}, {step['inputs']}",
            str(step["batch"]),
            f"{step['flops_per_sample'] / 1e9:.1f}",
            f"{step['bound']:,.0f}/s",
            f"{step['published']:,.0f}/s",
            f"{step['mfu']:.0%}",
            _gb(step["memory"]),
        )
        for name, step in expected.steps().items()
    )
    return _table(head, rows)


def _expected_queries() -> str:
    rows = (
        (f"{classes:,}", str(rows), _time(one), _time(every), f"{every / one:.1f}")
        for classes, rows, one, every in expected.queries()
    )
    return _table(("classes", "batch", "one logit", "all logits", "ratio"), rows)


# ------------------------------------------------------------------------ measured results


def measured_text(records: Records, drawn: Sequence[str]) -> list[str]:
    """Return the parts of the page that describe the results."""
    first = next(iter(records.values()))
    packages = ", ".join(f"{name} {v}" for name, v in first["key"]["packages"].items() if v)
    results = {name: r["result"] for name, r in records.items() if "result" in r}
    failed = [f"- `{name}`: {r['error']}" for name, r in records.items() if "error" in r]
    parts = ["## Results", f"{first['machine']}; {packages}."]
    if failed:
        parts += ["### Failed measurements", "\n".join(failed)]
    sections = {
        "losses": _losses,
        "collectives": _wrong_results,
        "checkpoint": _wrong_results,
        "synchronizations": _synchronizations,
    }
    for name, section in sections.items():
        if name in results:
            parts += [f"### {name.capitalize()}", section(results[name])]
    parts += _steps(results)
    parts += _heads(records, results)
    if "losses-with-tiles" in results:
        parts += ["### Losses with tiles", _losses_with_tiles(results["losses-with-tiles"])]
    if "fused" in results:
        parts += ["### Fused updates", _fused(results["fused"])]
    parts += _queries(records, results)
    return [*parts, *(f"![{Path(name).stem}](gpu/{name})" for name in drawn)]


def _losses(result: dict[str, Any]) -> str:
    rows = (
        (
            case["precision"],
            case["loss"],
            case["weights"],
            case["logits"],
            f"{case['error']:.1e}",
            str(case["worst_row"]),
        )
        for cases in result["worst"].values()
        for case in cases[:4]
    )
    medians = ", ".join(f"{error:.1e} in {name}" for name, error in result["median"].items())
    return (
        f"{result['num_cases']} combinations of loss, class weights, logit map and precision were "
        f"compared with float64 definitions on the CPU; {len(result['wrong'])} are wrong. The "
        f"median relative errors are {medians}. The largest errors are:\n\n"
        + _table(("precision", "loss", "weights", "logits", "error", "worst row"), rows)
    )


def _wrong_results(result: dict[str, Any]) -> str:
    wrong = result["wrong"]
    if not wrong:
        return "All results are correct."
    return "\n".join(["Wrong results:", "", *(f"- {line}" for line in wrong)])


def _synchronizations(result: dict[str, Any]) -> str:
    rows = (
        (
            case["strategy"],
            case["loss"],
            f"{case['synchronizations_per_step']:.2f}",
            f"{case['launches_per_step']:,.0f}",
            "; ".join(f"{number} x {site}" for site, number in case["sites"].items()),
        )
        for case in result["cases"]
    )
    return f"Counts for a tiny network, over {result['steps']} steps:\n\n" + _table(
        ("strategy", "loss", "synchronizations per step", "launches per step", "call sites"),
        rows,
    )


def _fused(result: dict[str, Any]) -> str:
    rows = (
        (
            case["dtype"],
            f"{case['classes']:,}",
            str(case["dim"]),
            f"{case['batch']:,}",
            *(
                (case["error"], "", "")
                if "error" in case
                else (
                    _time(case["seconds"]),
                    f"{case['flops_per_second'] / 1e12:.0f} TFLOP/s",
                    _gb(case["memory_bytes"]),
                )
            ),
        )
        for case in result["cases"]
    )
    head = ("rows", "classes", "features", "batch", "step", "of four products", "memory")
    return _table(head, rows)


def _steps(results: dict[str, Any]) -> list[str]:
    found = {name: results[name] for name in ("images", "texts") if name in results}
    if not found:
        return []
    plans = results.get("plan", {})
    rows = (
        (
            _NAMES[name],
            str(step["batch"]),
            f"{step['samples_per_second']['trainer']:,.0f}/s",
            f"{step['samples_per_second']['bare loop']:,.0f}/s",
            f"{step['ratio']:.3f}",
            _percent(step["mfu"]),
            _percent(step["idle_share"]),
            f"{step['synchronizations_per_step']:.2f}",
            _against(step["step_seconds"]["trainer"], plans.get(name, {}).get("seconds"), _time),
            _against(step["memory_bytes"], plans.get(name, {}).get("memory_bytes"), _gb),
        )
        for name, step in found.items()
    )
    head = (
        "model",
        "batch",
        "trainer",
        "bare loop",
        "time ratio",
        "MFU",
        "idle",
        "synchronizations",
        "step (plan)",
        "memory (plan)",
    )
    return ["### Measured steps", _table(head, rows)]


def _heads(records: Records, results: dict[str, Any]) -> list[str]:
    found = sized_results(records, "head-")
    if not found:
        return []
    plans = {
        (each["classes"], each["rows"]): each for each in results.get("plan", {}).get("heads", [])
    }
    rows: list[tuple[str, ...]] = []
    for head in found:
        bare = head["contenders"]["bare products"]["seconds"]
        plan = plans.get((head["classes"], head["rows"]), {})
        for name, each in head["contenders"].items():
            case = (f"{head['classes']:,}", f"{head['rows']:,}", name)
            if "seconds" not in each:
                rows.append((*case, each["error"], "", "", ""))
                continue
            is_kway, errors = name == "kway", each.get("errors", {})
            memory = each.get("memory_bytes")
            rows.append(
                (
                    *case,
                    _against(each["seconds"], plan.get("seconds") if is_kway else None, _time),
                    f"{each['seconds'] / bare:.2f}",
                    ""
                    if memory is None
                    else _against(memory, plan.get("memory_bytes") if is_kway else None, _gb),
                    ", ".join(f"{what} {error:.0e}" for what, error in errors.items()),
                )
            )
    head_row = (
        "classes",
        "batch",
        "loss",
        "time (plan)",
        "time / products",
        "memory (plan)",
        "errors",
    )
    return ["### Measured heads", _table(head_row, rows)]


def _losses_with_tiles(result: dict[str, Any]) -> str:
    of_ce = result["seconds"]["ce"]
    rows = (
        (kind, _time(seconds), f"{seconds / of_ce:.2f}")
        for kind, seconds in result["seconds"].items()
    )
    how = "with `head.tiles=true`" if result["tiles"] else "with torch operations"
    return (
        f"A step of {result['rows']:,} rows and {result['classes']:,} classes, {how}:\n\n"
        + _table(("loss", "time", "time / `ce`"), rows)
    )


def _queries(records: Records, results: dict[str, Any]) -> list[str]:
    found = sized_results(records, "serving-")
    rows = (
        (
            f"{each['classes']:,}",
            str(query["rows"]),
            _time(query["one_logit"]["seconds"]),
            _time(query["one_row_of_a_file"]["seconds"]),
            _time(query["all_logits"]["seconds"]),
            f"{query['all_over_one']:.1f}",
        )
        for each in found
        for query in each["queries"]
    )
    if not found:
        return []
    parts = ["### Measured queries"]
    if "serving-backbone" in results:
        times = results["serving-backbone"]["queries"]
        forward = ", ".join(f"{_time(each['seconds'])} for {each['rows']}" for each in times)
        parts.append(f"The forward pass of the image backbone takes, by batch size: {forward}.")
    head = ("classes", "batch", "one logit", "one row of a file", "all logits", "all / one")
    return [*parts, _table(head, rows)]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _against(value: float, planned: float | None, text: Any) -> str:
    return str(text(value)) + ("" if planned is None else f" ({text(planned)})")


def _time(seconds: float) -> str:
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{1e6 * seconds:.3g} µs"


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
