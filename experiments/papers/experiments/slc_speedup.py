"""Paper 002, Table 3: the speedup of one logit over all logits, by number of classes."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from experiments.papers.budget import Budget
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.job import Folders, Job, Measures, Results
from experiments.papers.published import published
from experiments.papers.section import Claim, Kind, Section, Table
from experiments.papers.turns import Median, milliseconds, ratio, timed

_JOB = "experiments.slc_speedup:time_network"
# By the published name.
_NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "resnet50": {"model_type": "resnet", "depths": [3, 4, 6, 3]},
    "resnet101": {"model_type": "resnet", "depths": [3, 4, 23, 3]},
}
_TOY = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]}
_TITLES = {"resnet50": "ResNet-50", "resnet101": "ResNet-101"}
_POWERS = (10, 14, 16, 18, 18.5)
_BATCHES = (32, 1)  # the paper's batch size, and single queries
# Seconds per minute of the experiment, by batch size.
_SECONDS = {32: 50, 1: 9}
_REPEATED = 1 << 14  # number of distinct noise rows, which are repeated to fill the weight


def time_network(settings: Mapping[str, Any], folders: Folders) -> Measures:
    """Time the backbone, one logit, and the logits of 2^power classes on random noise (a job).

    The backbone and the product with the class rows are timed separately, and their times are
    added. The backbone therefore does not have to run again for each number of classes.
    """
    import torch

    from data.images.config import ImageConfig
    from heads import ClassHead, ClassRows, CrossEntropy
    from trainer.backbone.backbone import build_backbone
    from trainer.backbone.config import BackboneConfig

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    image = ImageConfig(size=settings["side"])
    config = BackboneConfig(config=dict(settings["network"]))
    backbone = build_backbone(config, image=image).eval().to(device)
    noise = torch.randint(
        256, (settings["batch"], 3, image.size, image.size), dtype=torch.uint8, device=device
    )
    # The rows of this head are not used.
    head = ClassHead(backbone.dim, 1, CrossEntropy(), device=device)
    num_classes = {power: num_classes_of(power) for power in settings["powers"]}
    rows = _noise_rows(max(num_classes.values()), backbone.dim).to(device)
    classes = ClassRows(torch.arange(len(rows)), rows, rows.new_zeros(len(rows)))
    with torch.inference_mode():
        features = backbone({"pixel_values": noise})
        heads = {
            str(power): lambda number=number: head.logits(features, classes[:number])
            for power, number in num_classes.items()
        }
        found = timed(
            {
                "backbone": lambda: backbone({"pixel_values": noise}),
                "one": lambda: head.logits(features, classes[:1]),
                **heads,
            },
            folders,
            rounds=settings["rounds"],
            seconds=settings["seconds"],
        )
    return {"seconds": found, "device": device.type, "threads": torch.get_num_threads()}


def num_classes_of(power: float) -> int:
    """Return 2^power, rounded as in the paper."""
    return int(2**power)


def _noise_rows(number: int, width: int) -> Any:
    """Return repeated blocks of noise [number, width]. Repetition does not affect timings."""
    import torch

    rows = torch.empty(number, width)
    for block in rows.split(_REPEATED):
        if block.data_ptr() == rows.data_ptr():
            block.normal_()
        else:
            block.copy_(rows[: len(block)])
    return rows


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    networks = {"resnet50": _TOY} if budget.is_toy else _NETWORKS
    powers = (4, 6) if budget.is_toy else _POWERS
    batches = (2,) if budget.is_toy else _BATCHES
    minutes = EXPERIMENT.minutes * budget.effort / len(networks)
    jobs = {
        (name, batch): Job(
            _JOB,
            {
                "network": dict(networks[name]),
                "side": 32 if budget.is_toy else 224,
                "powers": list(powers),
                "batch": batch,
                "rounds": budget.size(15, full=100, least=2),
                # Start-up and the creation of the rows take additional time.
                "seconds": 600.0 if budget.is_full else max(1.0, _SECONDS.get(batch, 0) * minutes),
            },
            alone=True,
        )
        for name in networks
        for batch in batches
    }
    results = yield list(jobs.values())
    return _section(jobs, results, powers, plots)


def _section(
    jobs: Mapping[tuple[str, int], Job],
    results: Results,
    powers: Sequence[float],
    plots: PlotFolder,
) -> Section:
    speedups = {case: speedups_of(results[job].measures, powers) for case, job in jobs.items()}
    first = next(iter(jobs.values()))
    measures = results[first].measures
    device = "a GPU" if measures["device"] == "cuda" else f"{measures['threads']} CPU threads"
    tables = [
        _table(name, batch, results[job].measures, speedups[name, batch], powers)
        for (name, batch), job in jobs.items()
    ]
    side = first.settings["side"]
    rounds = min(len(results[job]["seconds"]["backbone"]) for job in jobs.values())
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=(
            "This experiment measures forward passes of networks with random weights on noise "
            f"images of {side} x {side} pixels, in eager torch on {device}. The backbone, the "
            "product with one class row and the product with all class rows are timed in turn, for "
            f"at least {rounds} rounds. The time of a forward pass is the time of the backbone "
            "plus that of the logits. The paper uses TensorFlow on a Titan X and a batch size of "
            f"{_BATCHES[0]}. Times are medians over rounds, with 95% confidence intervals."
        ),
        claims=_claims(speedups, powers),
        tables=tables,
        plots=[
            plots.save(
                EXPERIMENT.name,
                _figure(speedups, powers),
                title="Speedup from computing one logit instead of all logits.",
                alt_text="Speedup by number of classes, with one line per network and batch size.",
            )
        ],
        remarks=[
            _share_remark(jobs, results, powers[-1]),
            "The paper's other networks, AlexNet, VGG-16 and Inception-v3, were not tested because "
            "transformers does not include them.",
        ],
    )


def speedups_of(measures: Measures, powers: Sequence[float]) -> dict[float, Median]:
    """Return the time of a forward pass with all logits relative to one with a single logit."""
    seconds = measures["seconds"]
    one = [b + h for b, h in zip(seconds["backbone"], seconds["one"], strict=True)]
    return {
        power: ratio(
            [b + h for b, h in zip(seconds["backbone"], seconds[str(power)], strict=True)], one
        )
        for power in powers
    }


def _printed(name: str, power: float) -> float | None:
    found: float | None = published("002", "table 3", name).get(power)
    return found


def _table(
    name: str,
    batch: int,
    measures: Measures,
    speedups: Mapping[float, Median],
    powers: Sequence[float],
) -> Table:
    seconds = measures["seconds"]
    rows = []
    for key, label in (("one", "1"), *((str(power), f"2^{power:g}") for power in powers)):
        forward = [b + h for b, h in zip(seconds["backbone"], seconds[key], strict=True)]
        cells = [label, milliseconds([one / batch for one in forward])]
        if key == "one":
            rows.append([*cells, "", ""])
            continue
        power = powers[len(rows) - 1]
        printed = _printed(name, power)
        rows.append([*cells, speedups[power].text(), "" if printed is None else f"{printed:.2f}"])
    return Table(
        f"{_TITLES[name]}, batch size {batch}",
        ["logits", "ms per image", "speedup of one logit", "published (batch size 32)"],
        rows,
    )


def _claims(
    speedups: Mapping[tuple[str, int], Mapping[float, Median]], powers: Sequence[float]
) -> list[Claim]:
    claims, before = [], powers[-2]
    for (name, batch), found in speedups.items():
        printed = _printed(name, before)
        if printed is not None and batch == _BATCHES[0]:  # the paper's
            claims.append(
                Claim(
                    f"with 2^{before:g} classes, one logit is at least {printed:g} times as fast "
                    f"as all logits ({_TITLES[name]}, batch size {batch})",
                    found[before].above(printed),
                    f"{found[before].text()} times as fast",
                    Kind.PAPER,
                )
            )
    return claims


def _share_remark(jobs: Mapping[tuple[str, int], Job], results: Results, power: float) -> str:
    """Return a remark on the backbone's time, on which the speedup depends."""
    parts = []
    for (name, batch), job in jobs.items():
        seconds = results[job]["seconds"]
        share = ratio(seconds[str(power)], seconds["backbone"])
        parts.append(f"{share.text()} ({_TITLES[name]}, batch size {batch})")
    return (
        f"The time of the product with all 2^{power:g} class rows, relative to the backbone's, is "
        f"{'; '.join(parts)}. The time of one logit is negligible compared with both. A faster "
        "backbone (on a GPU or compiled) would change both the speedup and the number of classes "
        "above which computing one logit is faster."
    )


def _figure(
    speedups: Mapping[tuple[str, int], Mapping[float, Median]], powers: Sequence[float]
) -> Figure:
    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    styles = zip("osv^", ("tab:blue", "tab:orange", "tab:green", "tab:red"), strict=True)
    for (name, batch), (marker, color) in zip(speedups, styles, strict=False):
        found = [speedups[name, batch][power] for power in powers]
        middle = [one.value for one in found]
        label = f"{_TITLES[name]}, batch size {batch}"
        axes.plot(powers, middle, marker=marker, color=color, label=label)
        low, high = zip(*(one.band for one in found), strict=True)
        axes.fill_between(powers, low, high, color=color, alpha=0.2)
    for name, marker in zip(dict.fromkeys(name for name, _ in speedups), "xD", strict=False):
        printed = [(power, value) for power in powers if (value := _printed(name, power))]
        if printed:
            axes.plot(
                *zip(*printed, strict=True),
                "--",
                marker=marker,
                color="gray",
                label=f"{_TITLES[name]}, published",
            )
    axes.set_yscale("log")
    axes.set_xticks(powers, [f"$2^{{{power:g}}}$" for power in powers])
    axes.set_xlabel("number of classes")
    axes.set_ylabel("speedup of one logit")
    axes.legend()
    return figure


EXPERIMENT = Experiment(
    name="002-speedup",
    paper="002",
    title="Speedup of one logit (Table 3)",
    minutes=2,
    full="more rounds (the paper's times were measured on a GPU)",
    wants_gpu=True,
    procedure=_procedure,
)
