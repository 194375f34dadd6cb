"""Prints a plan as one table per topic, each within 80 columns, or converts it to JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from data.messages import pluralize
from launch.plan.advice import Change
from launch.plan.memory import MemoryTable
from launch.plan.plan import Plan

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SHOWN = 8
_NAME_WIDTH = 22
_RATES = {"cuda": "at peak rates", "cpu": "at the rates of this CPU"}
_PHASES = {
    "head": "in head",
    "backward": "in backward",
    "optimizer": "in optimizer",
    "manifest": "reading the manifest",
    "training": "training",
}


def show(
    plan: Plan,
    changes: Sequence[Change],
    warnings: Sequence[str],
    console: Console,
    *,
    mtbf_hours: float | None = None,
) -> None:
    """Print all tables of the plan."""
    machine = plan.cluster.machine
    titles = (
        f"device memory of the rank that needs the most, out of {size(machine.memory)}",
        "main memory per rank",
    )
    head = {"head": "in head"}, {"head": "building the head"}
    tables = (
        _memory(titles[0], plan.memory, _PHASES | head[0]),
        _memory(titles[1], plan.host, _PHASES | head[1]),
        _traffic(plan),
        _time(plan),
    )
    console.print(_headline(plan), Text())
    console.print(Group(*(part for table in tables for part in (table, Text()))))
    for line in (*_verdict(plan, changes), _checkpoint(plan, mtbf_hours)):
        console.print(Text(line))
    for warning in warnings:
        console.print(Text(f"warning: {warning}"))


def as_json(
    plan: Plan,
    changes: Sequence[Change],
    warnings: Sequence[str],
    *,
    mtbf_hours: float | None = None,
) -> dict[str, Any]:
    """Return the numbers of the tables as a JSON-compatible mapping, in bytes and seconds."""
    time, cluster, sizes = plan.time, plan.cluster, plan.cluster.sizes
    return {
        "nodes": cluster.nodes,
        "gpus": cluster.gpus,
        "machine": asdict(cluster.machine),
        "mesh": {"data": sizes["data"], "class": sizes["class"]},
        "classes": asdict(plan.classes),
        "backbone_weights": plan.backbone.numel,
        "head_rows_a_rank": plan.head.nodes,
        "memory": _memory_json(plan.memory),
        "host": {"ranks": plan.host.ranks, **_memory_json(plan.host)},
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
            "phases": [asdict(p) | {"seconds": p.seconds, "bound": p.bound} for p in time.phases],
            "step_seconds": time.seconds,
            "class_blocks": plan.head.blocks,
            "samples_per_second": plan.recipe.train.global_batch / time.seconds,
            "flops": time.flops,
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
        "peak": table.peak,
        "peak_phase": table.peak_phase,
        "capacity": table.capacity,
        "fits": table.fits,
    }


def _headline(plan: Plan) -> Text:
    cluster, head, train = plan.cluster, plan.head, plan.recipe.train
    config, sizes = plan.recipe.head, plan.cluster.sizes
    parts = -(-train.global_batch // cluster.ranks)
    return Text(
        f"{plan.recipe.run}: {cluster.nodes} x {cluster.gpus} x {cluster.machine.name}, "
        f"mesh data {sizes['data']} x class {sizes['class']}, {train.strategy.label}, "
        f"{train.precision}\n"
        f"backbone {plan.backbone.numel:,} weights; head {config.weights.kind} x "
        f"{config.loss.kind}, {plan.classes.num_classes:,} classes, {plan.classes.nodes:,} x "
        f"{head.dim} weights, {head.nodes:,} rows per rank\n"
        f"global batch {train.global_batch:,}: {parts:,} per rank in micro-batches of "
        f"{plan.backbone.rows:,}; the head processes {head.group_rows:,} rows per class group"
    )


def _memory(title: str, memory: MemoryTable, headings: dict[str, str]) -> Table:
    """Return a table of the items of `memory` and their totals, with one column per phase."""
    table = _table(title)
    table.add_column("item", overflow="fold")
    for phase in memory.phases:
        table.add_column(headings[phase], justify="right", no_wrap=True)
    for what, sizes in memory.lines.items():
        table.add_row(what, *map(size, sizes))
    table.add_row("total", *map(size, memory.totals.values()), style="bold")
    return table


def _traffic(plan: Plan) -> Table:
    cluster = plan.cluster
    table = _table(f"collectives per step: a rank sends {size(plan.sent)}")
    table.add_column("collective", overflow="fold", min_width=_NAME_WIDTH)
    table.add_column("group", no_wrap=True)
    for name in ("size", "sent", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    ordered = sorted(plan.collectives, key=lambda each: -cluster.seconds(each))
    for each in ordered[:_SHOWN]:
        where = "across" if cluster.crosses_nodes(each.group) else "in node"
        table.add_row(
            f"{each.what}, {each.operation.replace('_', '-')}",
            f"{each.group} {cluster.sizes[each.group]} {where}",
            (f"{each.calls} x " if each.calls > 1 else "") + size(each.bytes),
            size(cluster.sent(each)),
            duration(cluster.seconds(each)) + ("*" if each.hidden else ""),
        )
    if rest := ordered[_SHOWN:]:
        sent = sum(cluster.sent(each) for each in rest)
        seconds = sum(cluster.seconds(each) for each in rest)
        name = pluralize(len(rest), "smaller collective")
        table.add_row(name, "", "", size(sent), duration(seconds))
    return table


def _time(plan: Plan) -> Table:
    rates = _RATES[plan.cluster.machine.kind]
    table = _table(f"step time {rates}: {duration(plan.time.seconds)}")
    table.add_column("phase", no_wrap=True)
    for name in ("compute", "memory", "links", "total"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by", overflow="fold")
    for phase in plan.time.phases:
        seconds = phase.compute, phase.memory, phase.links, phase.seconds
        table.add_row(phase.phase, *map(duration, seconds), phase.bound)
    return table


def _verdict(plan: Plan, changes: Sequence[Change]) -> Iterable[str]:
    memory, time, train = plan.memory, plan.time, plan.recipe.train
    if any(each.hidden for each in plan.collectives):
        yield "* overlaps with computation; only the excess adds to the step time"
    rate = train.global_batch / time.seconds
    steps = plan.steps
    run = f"; {steps:,} steps take {duration(steps * time.seconds)}" if steps else ""
    yield f"{_RATES[plan.cluster.machine.kind]}: {rate:,.0f} samples/s{run}"
    yield _host_verdict(plan)
    device = "GPU memory" if plan.cluster.machine.kind == "cuda" else "the memory of a rank"
    need, capacity = f"{size(memory.peak)} in {memory.peak_phase}", plan.cluster.machine.memory
    if memory.fits:
        yield f"fits in {device}: {need}, {memory.peak / capacity:.0%} of the capacity"
        return
    yield (
        f"does not fit in {device}: {need}, {size(capacity)} available. Apply these changes in "
        "order:"
    )
    for number, change in enumerate(changes, 1):
        outcome = "fits" if change.fits else "does not fit yet"
        yield f"  {number}. {change.what}: {size(change.peak)}, {outcome}"
    if not changes or not changes[-1].fits:
        yield "  no further change helps: use fewer classes or a smaller backbone"


def _host_verdict(plan: Plan) -> str:
    host = plan.host
    phase = {**_PHASES, "head": "building the head"}[host.peak_phase]
    need = f"{size(host.peak)} per machine ({pluralize(host.ranks, 'rank')} {phase})"
    if host.capacity is None:
        return f"main memory: {need}; to check whether this fits, pass --host-memory"
    if host.fits:
        return f"fits in main memory: {need}, {host.peak / host.capacity:.0%} of the capacity"
    return (
        f"does not fit in main memory: {need}, {size(host.capacity)} available. Start fewer ranks "
        "per machine, or use fewer classes"
    )


def _checkpoint(plan: Plan, mtbf_hours: float | None) -> str:
    cost, seconds = plan.checkpoint, _interval(plan, mtbf_hours)
    line = (
        f"checkpoint: {size(cost.size)}, saved in {duration(cost.save)}, resumed in "
        f"{duration(cost.resume)}; "
    )
    if seconds is None:
        return line + "for the best interval, pass --mtbf"
    steps = max(1, round(seconds / plan.time.seconds))
    return line + f"save every {duration(seconds)} (checkpoint.every.steps={steps})"


def _interval(plan: Plan, mtbf_hours: float | None) -> float | None:
    if mtbf_hours is None:
        return None
    failures = plan.cluster.nodes / (3600 * mtbf_hours)
    return plan.checkpoint.interval(failures_per_second=failures)


def _table(title: str) -> Table:
    return Table(
        title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, expand=False
    )


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
