"""Prints a plan as one table per topic, each within 80 columns, or converts it to JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from data.messages import pluralize
from launch.plan.advice import Change
from launch.plan.device_memory import MOMENTS, Memory
from launch.plan.host_memory import HOST_MOMENTS, HostMemory, HostMoment
from launch.plan.plan import Plan
from trainer.strategies.cost import Collective

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SHOWN = 8
_NAME_WIDTH = 22
_WORTH_NAMING = 0.05  # of the step time
_RATES = {"cuda": "at peak rates", "cpu": "at the rates of this CPU"}
_HOST_PHASES: dict[HostMoment, str] = {
    "manifest": "reading the manifest",
    "head": "building the head",
    "training": "training",
}


def show(plan: Plan, changes: Sequence[Change], warnings: Sequence[str], console: Console) -> None:
    """Print all tables of the plan."""
    console.print(_headline(plan), Text())
    tables = (_memory(plan), _host(plan), _traffic(plan), _time(plan))
    console.print(Group(*(part for table in tables for part in (table, Text()))))
    for line in _verdict(plan, changes):
        console.print(Text(line))
    for warning in warnings:
        console.print(Text(f"warning: {warning}"))


def as_json(plan: Plan, changes: Sequence[Change], warnings: Sequence[str]) -> dict[str, Any]:
    """Return the numbers of the tables as a JSON-compatible mapping, in bytes and seconds."""
    memory, host, time, cluster = plan.memory, plan.host, plan.time, plan.cluster
    return {
        "nodes": cluster.nodes,
        "gpus": cluster.gpus,
        "machine": {
            field.name: getattr(cluster.machine, field.name)
            for field in fields(cluster.machine)
            if field.name != "timer"
        },
        "mesh": {"data": cluster.data_ranks, "class": cluster.class_ranks},
        "classes": asdict(plan.classes),
        "backbone_weights": plan.backbone.numel,
        "head_rows_a_rank": plan.head.nodes,
        "memory": {
            "lines": [asdict(line) for line in memory.lines],
            "totals": {moment: memory.total(moment) for moment in MOMENTS},
            "peak": memory.peak,
            "peak_phase": memory.peak_moment,
            "capacity": memory.capacity,
            "fits": memory.fits,
        },
        "host": {
            "lines": [asdict(line) for line in host.lines],
            "totals": {moment: host.total(moment) for moment in HOST_MOMENTS},
            "ranks": host.ranks,
            "peak": host.peak,
            "peak_phase": host.peak_moment,
            "capacity": host.capacity,
            "fits": host.fits,
        },
        "collectives": [_collective_json(each, plan) for each in plan.collectives],
        "sent_bytes": plan.sent,
        "time": {
            "phases": [asdict(p) | {"seconds": p.seconds, "bound": p.bound} for p in time.phases],
            "step_seconds": time.seconds,
            "launches": time.launches,
            "waits": time.waits,
            "class_blocks": plan.head.blocks,
            "launches_per_class_block": plan.operations.block_launches,
            "deferred": plan.operations.defers,
            "samples_per_second": plan.recipe.train.global_batch / time.seconds,
            "flops": time.flops,
        },
        "steps": plan.steps,
        "changes": [asdict(change) for change in changes],
        "warnings": list(warnings),
    }


def _collective_json(each: Collective, plan: Plan) -> dict[str, Any]:
    return asdict(each) | {
        "total": each.total,
        "sent": plan.cluster.sent(each),
        "seconds": plan.cluster.seconds(each),
        "crosses_nodes": plan.cluster.crosses_nodes(each.group),
    }


def _headline(plan: Plan) -> Text:
    cluster, head, train = plan.cluster, plan.head, plan.recipe.train
    config = plan.recipe.head
    strategy = train.strategy
    parts = -(-train.global_batch // cluster.ranks)
    return Text(
        f"{plan.recipe.run}: {cluster.nodes} x {cluster.gpus} x {cluster.machine.name}, "
        f"mesh data {cluster.data_ranks} x class {cluster.class_ranks}, {strategy.label}, "
        f"{train.precision}\n"
        f"backbone {plan.backbone.numel:,} weights; head {config.weights.kind} x "
        f"{config.loss.kind}, {plan.classes.num_classes:,} classes, {plan.classes.nodes:,} x "
        f"{head.dim} weights, {head.nodes:,} rows per rank\n"
        f"global batch {train.global_batch:,}: {parts:,} per rank in micro-batches of "
        f"{plan.backbone.rows:,}; the head processes {head.group_rows:,} rows per class group"
    )


def _memory(plan: Plan) -> Table:
    title = f"device memory of the rank that needs the most, out of {size(plan.memory.capacity)}"
    return _phases(title, {moment: f"in {moment}" for moment in MOMENTS}, plan.memory)


def _host(plan: Plan) -> Table:
    return _phases("main memory per rank", _HOST_PHASES, plan.host)


def _phases(title: str, headings: Mapping[Any, str], memory: Memory | HostMemory) -> Table:
    """Return a table of the items of `memory` and their totals, with one column per phase."""
    table = _table(title)
    table.add_column("item", overflow="fold")
    for heading in headings.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for line in memory.lines:
        table.add_row(line.what, *(size(getattr(line, phase)) for phase in headings))
    table.add_row("total", *(size(memory.total(phase)) for phase in headings), style="bold")
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
            f"{each.group} {cluster.size(each.group)} {where}",
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
    for name in ("compute", "memory", "links", "launches", "waits", "total"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by", overflow="fold")
    for phase in plan.time.phases:
        table.add_row(
            phase.phase,
            *map(duration, (phase.compute, phase.memory, phase.links)),
            f"{phase.launches:,}",
            f"{phase.waits:,}" if phase.waits else "-",
            duration(phase.seconds),
            phase.bound,
        )
    return table


def _launches(plan: Plan) -> Iterable[str]:
    """Describe the launches on a GPU, and how to reduce them if the host limits the step."""
    time, head, machine = plan.time, plan.head, plan.cluster.machine
    if not machine.launch_seconds:
        return
    blocks = pluralize(head.blocks, "class block")
    if plan.operations.block:
        blocks += (
            f", {plan.operations.block_launches} launches each unless forward saves its logits"
        )
    waits = "the host never waits for the device"
    if time.waits:
        waits = f"the host waits {pluralize(time.waits, 'time')} for the device"
    yield f"{time.launches:,} launches per step ({blocks}); {waits}"
    for phase in time.phases:
        if phase.bound != "launches" or phase.seconds < _WORTH_NAMING * time.seconds:
            continue
        line = (
            f"{phase.phase}: the launches take {duration(phase.launching)}, longer than the work "
            f"of the device ({duration(phase.device)})"
        )
        if phase.phase == "head" and head.blocks > 1:
            line += f"; raise head.memory_mib above {head.memory_mib} for fewer blocks"
        yield line


def _verdict(plan: Plan, changes: Sequence[Change]) -> Iterable[str]:
    memory, time, train = plan.memory, plan.time, plan.recipe.train
    if any(each.hidden for each in plan.collectives):
        yield "* overlaps with computation; only the excess adds to the step time"
    yield from _launches(plan)
    rate = train.global_batch / time.seconds
    steps = plan.steps
    run = f"; {steps:,} steps take {duration(steps * time.seconds)}" if steps else ""
    yield f"{_RATES[plan.cluster.machine.kind]}: {rate:,.0f} samples/s{run}"
    yield _host_verdict(plan)
    device = "GPU memory" if plan.cluster.machine.kind == "cuda" else "the memory of a rank"
    if memory.fits:
        need = f"{size(memory.peak)} in {memory.peak_moment}"
        yield f"fits in {device}: {need}, {memory.peak / memory.capacity:.0%} of the capacity"
        return
    yield (
        f"does not fit in {device}: {size(memory.peak)} in {memory.peak_moment}, "
        f"{size(memory.capacity)} available. Apply these changes in order:"
    )
    for number, change in enumerate(changes, 1):
        outcome = "fits" if change.fits else "does not fit yet"
        yield f"  {number}. {change.what}: {size(change.peak)}, {outcome}"
    if not changes or not changes[-1].fits:
        yield "  no further change helps: use fewer classes or a smaller backbone"


def _host_verdict(plan: Plan) -> str:
    host = plan.host
    phase = _HOST_PHASES[host.peak_moment]
    need = f"{size(host.peak)} per machine ({pluralize(host.ranks, 'rank')} {phase})"
    if host.capacity is None:
        return f"main memory: {need}; to check whether this fits, pass --host-memory"
    if host.fits:
        return f"fits in main memory: {need}, {host.peak / host.capacity:.0%} of the capacity"
    return (
        f"does not fit in main memory: {need}, {size(host.capacity)} available. Start fewer ranks "
        "per machine, or use fewer classes"
    )


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
