"""Prints a plan as one table per topic, each within 80 columns."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from data.messages import pluralize
from launch.plan.memory import MemoryTable
from launch.plan.plan import Plan

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_RATES = {"cuda": "at peak rates", "cpu": "at the rates of this CPU"}


def show(plan: Plan, changes: Sequence[tuple[str, Plan]], console: Console) -> None:
    """Print all tables of the plan."""
    rates, capacity = _RATES[plan.machine.kind], size(plan.machine.memory)
    phases = [f"in {phase}" for phase in plan.memory.phases]
    of_time = ((phase.phase, *map(duration, (*phase[1:], phase.seconds))) for phase in plan.phases)
    console.print(_headline(plan), Text())
    memory = f"device memory of the rank that needs the most, out of {capacity}"
    _print(console, memory, ("item", *phases), _rows_of(plan.memory))
    _print(console, "main memory per rank", ("item", *plan.host.phases), _rows_of(plan.host))
    step = f"step time {rates}: {duration(plan.seconds)}"
    _print(console, step, ("phase", "compute", "memory", "links", "total"), of_time)
    for line in _verdict(plan, changes):
        console.print(Text(line))


def _print(
    console: Console, title: str, headings: Sequence[str], rows: Iterator[Sequence[str]]
) -> None:
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    first, *others = headings
    table.add_column(first, overflow="fold", min_width=9)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row, style="bold" if row[0] == "total" else None)
    console.print(table, Text())


def _rows_of(memory: MemoryTable) -> Iterator[tuple[str, ...]]:
    for what, sizes in (*memory.lines.items(), ("total", memory.totals.values())):
        if any(sizes):
            yield what, *map(size, sizes)


def _headline(plan: Plan) -> Text:
    cluster, head, train = plan.cluster, plan.head, plan.recipe.train
    config, classes = plan.recipe.head, plan.classes
    bound = " (at most, depending on the label tree)" if classes.is_bound else ""
    return Text(
        f"{plan.recipe.run}: {cluster.nodes} x {cluster.gpus} x {plan.machine.name}, mesh data "
        f"{cluster.size('data')} x class {cluster.class_ranks}, {train.strategy.label}, "
        f"{train.precision}\n"
        f"backbone {plan.backbone.numel:,} weights; head {config.weights.kind} x "
        f"{config.loss.kind}, {classes.num_classes:,} classes, {classes.nodes:,}{bound} x "
        f"{head.dim} weights, {head.nodes:,} rows per rank\n"
        f"global batch {train.global_batch:,}: {-(-train.global_batch // cluster.ranks):,} per "
        f"rank in micro-batches of {plan.backbone.rows:,}; the head processes "
        f"{head.group_rows:,} rows per class group"
    )


def _verdict(plan: Plan, changes: Sequence[tuple[str, Plan]]) -> Iterator[str]:
    train, machine = plan.recipe.train, plan.machine
    if train.precision not in machine.flops:
        yield f"warning: {machine.name} does not support {train.precision}: use fp16 or fp32"
    rate = train.global_batch / plan.seconds
    shown = f"{rate:,.{0 if rate >= 10 else 2}f} samples/s"
    sent = f"; a rank sends {size(plan.sent)} in a step" if plan.sent else ""
    yield f"{_RATES[machine.kind]}: {shown}{sent}"
    cost, interval = plan.checkpoint, plan.interval
    line = f"checkpoint: {size(cost.size)}, saved in {duration(cost.save)}, resumed in "
    line += f"{duration(cost.resume)}; for the best interval, pass --mtbf"
    if interval is not None:
        number = max(1, round(interval / plan.seconds))
        every = f"save every {duration(interval)} (checkpoint.every.steps={number})"
        line = line.replace("for the best interval, pass --mtbf", every)
    yield line
    ranks = f"{pluralize(plan.host.ranks, 'rank')} {plan.host.peak_phase}"
    yield _fit("main memory", f"{size(plan.host.peak)} per machine ({ranks})", plan.host)
    memory = "GPU memory" if machine.kind == "cuda" else "the memory of a rank"
    yield _fit(memory, f"{size(plan.memory.peak)} in {plan.memory.peak_phase}", plan.memory)
    if plan.memory.fits:
        return
    yield "apply these changes in order:"
    for number, (what, after) in enumerate(changes, 1):
        outcome = "fits" if after.memory.fits else "does not fit yet"
        yield f"  {number}. {what}: {size(after.memory.peak)}, {outcome}"
    if not changes or not changes[-1][1].memory.fits:
        yield "  no further change helps: use fewer classes or a smaller backbone"


def _fit(what: str, need: str, memory: MemoryTable) -> str:
    if memory.capacity is None:
        return f"{what}: {need}"
    if memory.fits:
        return f"fits in {what}: {need}, {memory.peak / memory.capacity:.0%} of the capacity"
    return f"does not fit in {what}: {need}, {size(memory.capacity)} available"


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
