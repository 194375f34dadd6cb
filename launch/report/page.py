"""The report page: one self-contained HTML file without scripts.

All text that comes from a run, such as metric names, is escaped.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files

import numpy as np

from data.messages import pluralize, printable
from launch.report.figures import SECTIONS, Plot, latest_evaluation
from launch.report.numbers import phases_table, recipe_differences, summary_table
from launch.report.reading import Run
from launch.report.theme import NUM_COLORS, PALETTE, as_svg, report_style

_MAX_EVENTS = 200
_MAX_VALUE_CHARACTERS = 300


def report_page(runs: Sequence[Run], progress: Callable[[int, int], None]) -> str:
    """The complete page. Calls `progress(done, total)` for each section."""
    parts = [_title(runs), _runs(runs), _problems(runs), _overview(runs)]
    for done, (title, plots) in enumerate(SECTIONS.items()):
        progress(done, len(SECTIONS))
        drawn = _figures(plots(runs))
        if drawn:
            phases = _phases(runs) if title == "Speed and memory" else ""
            parts.append(_section(title, f'<div class="plots">{drawn}{phases}</div>'))
    progress(len(SECTIONS), len(SECTIONS))
    parts += [_events(runs), _recipes(runs)]
    return _frame(runs, "\n".join(part for part in parts if part))


def _frame(runs: Sequence[Run], body: str) -> str:
    names = ", ".join(run.name for run in runs)
    style = files("launch.report").joinpath("page.css").read_text(encoding="utf-8")
    # Defense in depth: even unescaped markup can neither run scripts nor load resources.
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_text(f"kway report: {names}")}</title>
<style>
{_variables()}
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _variables() -> str:
    light, dark = (
        " ".join(f"--{name}: {colors[mode]};" for name, colors in PALETTE.items())
        for mode in (0, 1)
    )
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"


def _title(runs: Sequence[Run]) -> str:
    time = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    title = f"kway report: {pluralize(len(runs), 'run')}"
    return f'<h1>{title}</h1>\n<p class="quiet">created {time}</p>'


def _runs(runs: Sequence[Run]) -> str:
    items = "".join(
        f"<li>{_letter(run)} <b>{_text(run.name)}</b> "
        f'<span class="quiet">{_text(run.state)}</span></li>'
        for run in runs
    )
    return f'<ul class="runs" aria-label="Runs, with their letters and plot colors">{items}</ul>'


def _problems(runs: Sequence[Run]) -> str:
    lines = [
        f"<li>{_letter(run)} {_text(problem)}</li>" for run in runs for problem in run.problems
    ]
    if not lines:
        return ""
    return f'<div class="problems" role="note"><ul>{"".join(lines)}</ul></div>'


def _overview(runs: Sequence[Run]) -> str:
    """The summary, the latest evaluation and the recipe differences, side by side if they fit."""
    summary = _section("Summary", _grid(runs, summary_table(runs), "figures"))
    evaluation = _section("Latest evaluation", _figures(latest_evaluation(runs)))
    return f'<div class="overview">{summary}{evaluation}{_differences(runs)}</div>'


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{_text(title)}</h2>\n{inside}</section>" if inside else ""


def _figures(plots: Iterator[Plot]) -> str:
    with report_style():
        return "".join(_figure(plot) for plot in plots)


def _figure(plot: Plot) -> str:
    title = f"<h3>{_text(plot.title)}</h3>" if plot.title else ""
    note = f"<figcaption>{_text(plot.note)}</figcaption>" if plot.note else ""
    svg = as_svg(plot.figure, _text(plot.alt_text))
    return f"<figure>{title}{svg}{_legend(plot.legend)}{note}</figure>\n"


def _legend(parts: Sequence[str]) -> str:
    items = "".join(
        f'<li><span class="swatch part{number % NUM_COLORS}"></span>{_text(part)}</li>'
        for number, part in enumerate(parts)
    )
    return f'<ul class="legend">{items}</ul>' if items else ""


def _phases(runs: Sequence[Run]) -> str:
    """The numbers of the phase plot, as a table."""
    rows = phases_table(runs)
    if not rows:
        return ""
    table = _grid(runs, rows, "figures", names=False)
    return f'<div class="panel"><h3>Share of time by phase</h3>{table}</div>'


def _grid(
    runs: Sequence[Run], rows: Mapping[str, Sequence[str]], kind: str, *, names: bool = True
) -> str:
    """A table with one column per run, in its own horizontally scrolling container.

    names: write the runs' names in the header in addition to their letters.
    """
    heads = "".join(
        f'<th scope="col">{_letter(run)}{f" {_text(run.name)}" if names else ""}</th>'
        for run in runs
    )
    body = "".join(
        f'<tr><th scope="row">{_breakable(name) if kind == "words" else _text(name)}</th>'
        + "".join(f"<td>{_text(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, cells in rows.items()
    )
    head = f"<thead><tr><td></td>{heads}</tr></thead>"
    return _scrolled(f'<table class="{kind}">{head}<tbody>{body}</tbody></table>')


def _scrolled(table: str) -> str:
    return f'<div class="wide" role="region" aria-label="Table" tabindex="0">{table}</div>'


def _differences(runs: Sequence[Run]) -> str:
    known = [run for run in runs if run.recipe]
    if len(known) < 2:
        return ""
    rows = recipe_differences([run.recipe for run in known])
    if not rows:
        return _section("Recipe differences", "<p>The recipes are identical.</p>")
    return _section("Recipe differences", _grid(known, rows, "words"))


def _events(runs: Sequence[Run]) -> str:
    """The newest events of each run, except steps and evaluations."""
    rows = []
    for run in runs:
        events = [event for event in run.steps.events if event.name != "evaluation"]
        for event in events[-_MAX_EVENTS:]:
            when = ""
            if np.isfinite(event.time) and 0 <= event.time < 1 << 36:
                when = datetime.fromtimestamp(event.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
            values = ", ".join(f"{name}: {value}" for name, value in event.values.items())
            cells = (f"{event.step:,}", event.name, values[:_MAX_VALUE_CHARACTERS], when)
            described = "".join(f"<td>{_text(cell)}</td>" for cell in cells)
            rows.append(f"<tr><td>{_letter(run)}</td>{described}</tr>")
    if not rows:
        return ""
    names = ("run", "step", "event", "details", "time (UTC)")
    heads = "".join(f'<th scope="col">{name}</th>' for name in names)
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    summary = f"<summary>{pluralize(len(rows), 'event')}</summary>"
    return _section("Events", f"<details>{summary}{_scrolled(table)}</details>")


def _recipes(runs: Sequence[Run]) -> str:
    parts = [
        f"<details><summary>{_letter(run)} {_text(run.name)}</summary>"
        f'<pre tabindex="0">{"".join(_lines(run.recipe_text))}</pre></details>'
        for run in runs
        if run.recipe_text
    ]
    return _section("Recipes", "".join(parts))


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        yield f"{_text(line)}\n"


def _letter(run: Run) -> str:
    return f'<span class="letter run{run.number % NUM_COLORS}">{run.letter}</span>'


def _breakable(key: str) -> str:
    """A recipe key that may be wrapped after its dots."""
    return _text(key).replace(".", ".<wbr>")


def _text(text: str) -> str:
    return escape(printable(text), quote=True)
