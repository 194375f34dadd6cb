"""The report page: one self-contained HTML file without scripts.

All text that comes from a run, such as names of measures, is escaped.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files

import numpy as np

from data.messages import printable
from launch.report.figures import SECTIONS, Plot
from launch.report.numbers import phases_table, recipe_differences, summary_table
from launch.report.reading import Run
from launch.report.theme import NUM_COLOURS, PALETTE, as_svg, report_style

_MOST_EVENTS = 200
_LONGEST_VALUE = 300


def report_page(runs: Sequence[Run], progress: Callable[[int, int], None]) -> str:
    """The complete page. Calls `progress(done, total)` for each section."""
    parts = [
        _title(runs),
        _runs(runs),
        _troubles(runs),
        _section("Numbers", _grid(runs, summary_table(runs), "figures")),
    ]
    for done, (title, plots) in enumerate(SECTIONS.items()):
        progress(done, len(SECTIONS))
        with report_style():
            drawn = "".join(_figure(plot) for plot in plots(runs))
        if drawn:
            parts.append(
                _section(title, f'<div class="plots">{drawn}</div>{_phase_shares(title, runs)}')
            )
    progress(len(SECTIONS), len(SECTIONS))
    parts += [_differences(runs), _events(runs), _recipes(runs)]
    return _frame(runs, "\n".join(part for part in parts if part))


def _frame(runs: Sequence[Run], body: str) -> str:
    names = ", ".join(run.name for run in runs)
    style = files("launch.report").joinpath("page.css").read_text(encoding="utf-8")
    # Defense in depth: markup that escaped the escaping can neither run scripts nor load anything.
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
        " ".join(f"--{name}: {colours[mode]};" for name, colours in PALETTE.items())
        for mode in (0, 1)
    )
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"


def _title(runs: Sequence[Run]) -> str:
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    several = "s" if len(runs) != 1 else ""
    return f'<h1>{len(runs)} run{several} of kway</h1>\n<p class="quiet">{made}</p>'


def _runs(runs: Sequence[Run]) -> str:
    items = "".join(
        f"<li>{_letter(run)} <b>{_text(run.name)}</b> "
        f'<span class="quiet">{_text(run.state)}</span></li>'
        for run in runs
    )
    return f'<ul class="runs" aria-label="Runs, by the letters of the plots">{items}</ul>'


def _troubles(runs: Sequence[Run]) -> str:
    lines = [
        f"<li>{_letter(run)} {_text(trouble)}</li>" for run in runs for trouble in run.troubles
    ]
    if not lines:
        return ""
    return f'<div class="troubles" role="note"><ul>{"".join(lines)}</ul></div>'


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{_text(title)}</h2>\n{inside}</section>" if inside else ""


def _figure(plot: Plot) -> str:
    note = f"<figcaption>{_text(plot.note)}</figcaption>" if plot.note else ""
    svg = as_svg(plot.figure, _text(plot.alt_text))
    return f"<figure><h3>{_text(plot.title)}</h3>{svg}{note}</figure>\n"


def _phase_shares(title: str, runs: Sequence[Run]) -> str:
    """The table of phase shares, which follows the plots of speed."""
    rows = phases_table(runs) if title == "Speed and memory" else {}
    return f"<h3>Where the time goes</h3>{_grid(runs, rows, 'figures')}" if rows else ""


def _grid(runs: Sequence[Run], rows: Mapping[str, Sequence[str]], kind: str) -> str:
    """A table with one column per run, in its own horizontally scrolling container."""
    heads = "".join(f'<th scope="col">{_letter(run)} {_text(run.name)}</th>' for run in runs)
    body = "".join(
        f'<tr><th scope="row">{_text(name)}</th>'
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
        return _section("Recipes", "<p>The recipes are the same.</p>")
    return _section("Recipes: what differs", _grid(known, rows, "words"))


def _events(runs: Sequence[Run]) -> str:
    """The newest events of each run, other than steps and evaluations."""
    rows = []
    for run in runs:
        events = [event for event in run.steps.events if event.name != "evaluation"]
        for event in events[-_MOST_EVENTS:]:
            when = ""
            if np.isfinite(event.time) and 0 <= event.time < 1 << 36:
                when = datetime.fromtimestamp(event.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
            values = ", ".join(f"{name}: {value}" for name, value in event.values.items())
            cells = (f"{event.step:,}", event.name, values[:_LONGEST_VALUE], when)
            described = "".join(f"<td>{_text(cell)}</td>" for cell in cells)
            rows.append(f"<tr><td>{_letter(run)}</td>{described}</tr>")
    if not rows:
        return ""
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("run", "step", "event", "", "UTC"))
    whole = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    summary = f"<summary>{len(rows)} events</summary>"
    return _section("Events", f"<details>{summary}{_scrolled(whole)}</details>")


def _recipes(runs: Sequence[Run]) -> str:
    parts = [
        f"<details><summary>{_letter(run)} {_text(run.name)}</summary>"
        f'<pre tabindex="0">{"".join(_lines(run.recipe_text))}</pre></details>'
        for run in runs
        if run.recipe_text
    ]
    return _section("Recipes in full", "".join(parts))


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        yield f"{_text(line)}\n"


def _letter(run: Run) -> str:
    return f'<span class="letter run{run.number % NUM_COLOURS}">{run.letter}</span>'


def _text(text: str) -> str:
    return escape(printable(text), quote=True)
