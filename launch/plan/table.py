"""Prints a plan as one table per topic, each within 80 columns, or converts it to JSON."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from data.messages import pluralize
from launch.plan.advice import Change
from launch.plan.memory import MemoryTable
from launch.plan.plan import Plan

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SHOWN = 8
_RATES = {"cuda": "at peak rates", "cpu": "at the rates of this CPU"}
_HOST_PHASES = ("reading the manifest", "building the head", "training")


def show(
    plan: Plan,
    changes: Sequence[Change],
    warnings: Sequence[str],
    console: Console,
    *,
    mtbf_hours: float | None = None,
) -> None:
    """Print all tables of the plan."""
    rates, capacity = _RATES[plan.cluster.machine.kind], size(plan.cluster.machine.memory)
    phases = [f"in {phase}" for phase in plan.memory.phases]
    of_time = [
        (
            phase.phase,
            *map(duration, (phase.compute, phase.memory, phase.links, phase.seconds)),
            phase.bound,
        )
        for phase in plan.phases
    ]
    tables = (
        (
            f"device memory of the rank that needs the most, out of {capacity}",
            ("item", *phases),
            _rows_of(plan.memory),
        ),
        ("main memory per rank", ("item", *_HOST_PHASES), _rows_of(plan.host)),
        (
            f"collectives per step: a rank sends {size(plan.sent)}",
            ("collective", "group", "size", "sent", "time"),
            _traffic(plan),
        ),
        (
            f"step time {rates}: {duration(plan.seconds)}",
            ("phase", "compute", "memory", "links", "total", "bound by"),
            of_time,
        ),
    )
    console.print(_headline(plan), Text())
    for title, headings, rows in tables:
        console.print(_table(title, headings, rows), Text())
    for line in (*_verdict(plan, changes), _checkpoint(plan, mtbf_hours)):
        console.print(Text(line))
    for warning in warnings:
        console.print(Text(f"warning: {warning}"))


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(
        title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, expand=False
    )
    first, *others = headings
    table.add_column(first, overflow="fold", min_width=9)
    for heading in others:
        is_text = heading in ("group", "bound by")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text)
    for row in rows:
        table.add_row(*row, style="bold" if row[0] == "total" else None)
    return table


def _rows_of(memory: MemoryTable) -> list[tuple[str, ...]]:
    lines = {**memory.lines, "total": tuple(memory.totals.values())}
    return [(what, *map(size, sizes)) for what, sizes in lines.items()]


def _traffic(plan: Plan) -> Iterator[tuple[str, ...]]:
    cluster = plan.cluster
    ordered = sorted(plan.collectives, key=lambda each: -cluster.seconds(each))
    for each in ordered[:_SHOWN]:
        where = "across" if cluster.crosses_nodes(each.group) else "in node"
        yield (
            f"{each.what}, {each.operation.replace('_', '-')}",
            f"{each.group} {cluster.size(each.group)} {where}",
            (f"{each.calls} x " if each.calls > 1 else "") + size(each.bytes),
            size(cluster.sent(each)),
            duration(cluster.seconds(each)) + ("*" if each.hidden else ""),
        )
    if rest := ordered[_SHOWN:]:
        sent, seconds = sum(map(cluster.sent, rest)), sum(map(cluster.seconds, rest))
        yield pluralize(len(rest), "smaller collective"), "", "", size(sent), duration(seconds)


def _headline(plan: Plan) -> Text:
    cluster, head, train = plan.cluster, plan.head, plan.recipe.train
    config, machine = plan.recipe.head, cluster.machine.name
    return Text(
        f"{plan.recipe.run}: {cluster.nodes} x {cluster.gpus} x {machine}, mesh data "
        f"{cluster.size('data')} x class {cluster.class_ranks}, {train.strategy.label}, "
        f"{train.precision}\n"
        f"backbone {plan.backbone.numel:,} weights; head {config.weights.kind} x "
        f"{config.loss.kind}, {plan.classes.num_classes:,} classes, {plan.classes.nodes:,} x "
        f"{head.dim} weights, {head.nodes:,} rows per rank\n"
        f"global batch {train.global_batch:,}: {-(-train.global_batch // cluster.ranks):,} per "
        f"rank in micro-batches of {plan.backbone.rows:,}; the head processes "
        f"{head.group_rows:,} rows per class group"
    )


def _verdict(plan: Plan, changes: Sequence[Change]) -> Iterator[str]:
    memory, seconds, machine = plan.memory, plan.seconds, plan.cluster.machine
    if any(each.hidden for each in plan.collectives):
        yield "* overlaps with computation; only the excess adds to the step time"
    rate, steps = plan.recipe.train.global_batch / seconds, plan.steps
    run = f"; {steps:,} steps take {duration(steps * seconds)}" if steps else ""
    digits = 0 if rate >= 10 else 2
    yield f"{_RATES[machine.kind]}: {rate:,.{digits}f} samples/s{run}"
    host = plan.host
    phase = _HOST_PHASES[host.phases.index(host.peak_phase)]
    need = f"{size(host.peak)} per machine ({pluralize(host.ranks, 'rank')} {phase})"
    if host.capacity is None:
        yield f"main memory: {need}; to check whether this fits, pass --host-memory"
    elif host.fits:
        yield f"fits in main memory: {need}, {host.peak / host.capacity:.0%} of the capacity"
    else:
        yield (
            f"does not fit in main memory: {need}, {size(host.capacity)} available. Start fewer "
            "ranks per machine, or use fewer classes"
        )
    device = "GPU memory" if machine.kind == "cuda" else "the memory of a rank"
    need = f"{size(memory.peak)} in {memory.peak_phase}"
    if memory.fits:
        yield f"fits in {device}: {need}, {memory.peak / machine.memory:.0%} of the capacity"
        return
    yield (
        f"does not fit in {device}: {need}, {size(machine.memory)} available. Apply these changes "
        "in order:"
    )
    for number, change in enumerate(changes, 1):
        outcome = "fits" if change.fits else "does not fit yet"
        yield f"  {number}. {change.what}: {size(change.peak)}, {outcome}"
    if not changes or not changes[-1].fits:
        yield "  no further change helps: use fewer classes or a smaller backbone"


def _checkpoint(plan: Plan, mtbf_hours: float | None) -> str:
    cost, interval = plan.checkpoint, _interval(plan, mtbf_hours)
    line = f"checkpoint: {size(cost.size)}, saved in {duration(cost.save)}"
    line += f", resumed in {duration(cost.resume)}; "
    if interval is None:
        return line + "for the best interval, pass --mtbf"
    steps = max(1, round(interval / plan.seconds))
    return line + f"save every {duration(interval)} (checkpoint.every.steps={steps})"


def _interval(plan: Plan, mtbf_hours: float | None) -> float | None:
    if mtbf_hours is None:
        return None
    failures = plan.cluster.nodes / (3600 * mtbf_hours)
    return plan.checkpoint.interval(failures_per_second=failures)


def as_json(
    plan: Plan,
    changes: Sequence[Change],
    warnings: Sequence[str],
    *,
    mtbf_hours: float | None = None,
) -> dict[str, Any]:
    """Return the numbers of the tables as a JSON-compatible mapping, in bytes and seconds."""
    cluster = plan.cluster
    return {
        "nodes": cluster.nodes,
        "gpus": cluster.gpus,
        "machine": asdict(cluster.machine),
        "mesh": {"data": cluster.size("data"), "class": cluster.class_ranks},
        "classes": asdict(plan.classes),
        "backbone_weights": plan.backbone.numel,
        "head_rows_a_rank": plan.head.nodes,
        "memory": _memory_json(plan.memory),
        "host": _memory_json(plan.host),
        "collectives": [
            asdict(each)
            | {
                "total": each.bytes * each.calls,
                "sent": cluster.sent(each),
                "seconds": cluster.seconds(each),
                "crosses_nodes": cluster.crosses_nodes(each.group),
            }
            for each in plan.collectives
        ],
        "sent_bytes": plan.sent,
        "time": {
            "phases": [asdict(p) | {"seconds": p.seconds, "bound": p.bound} for p in plan.phases],
            "step_seconds": plan.seconds,
            "class_blocks": plan.head.blocks,
            "samples_per_second": plan.recipe.train.global_batch / plan.seconds,
            "flops": plan.flops,
        },
        "steps": plan.steps,
        "checkpoint": {
            "bytes": plan.checkpoint.size,
            "save_seconds": plan.checkpoint.save,
            "resume_seconds": plan.checkpoint.resume,
            "interval_seconds": _interval(plan, mtbf_hours),
        },
        "changes": [asdict(change) for change in changes],
        "warnings": list(warnings),
    }


def _memory_json(table: MemoryTable) -> dict[str, Any]:
    return {
        "lines": [
            {"what": what, **dict(zip(table.phases, sizes, strict=True))}
            for what, sizes in table.lines.items()
        ],
        "totals": table.totals,
        "ranks": table.ranks,
        "peak": table.peak,
        "peak_phase": table.peak_phase,
        "capacity": table.capacity,
        "fits": table.fits,
    }


def size(number: float) -> str:
    """Format bytes with three digits: `12.3 MiB`."""
    if not number:
        return "-"
    unit = 0
    while abs(number) >= 999.5 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    digits = 0 if unit == 0 or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Format seconds with three digits: `12.3 ms`."""
    if not seconds:
        return "-"
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= length * (2 if unit in ("d", "h", "min") else 1):
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us" if seconds >= 1e-7 else "< 0.1 us"
