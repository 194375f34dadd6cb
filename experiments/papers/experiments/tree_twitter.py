"""Paper 000, Table 1, on tweets: TweetEval's emoji task, with and without U+FE0F characters that
reveal some labels."""

from collections.abc import Mapping
from typing import Any

from experiments.papers.budget import Budget
from experiments.papers.comparison import Comparison, Rates, Run, cell, grid
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.experiments.tree_tables import ARMS, claims, figure, head, table
from experiments.papers.intervals import Mean
from experiments.papers.section import Kind, Section, Table
from experiments.papers.shards import EMOJI_VECTORS, TWEETS, Dataset
from experiments.papers.training import LEARNED

_STAND_IN = {
    "model_type": "bert",
    "vocab_size": 20_000,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
_PUBLISHED = "sentence-transformers/LaBSE"


class _Design:
    """`texts`: "clean" removes remnants of emoji from the texts; "keep" leaves them in."""

    def __init__(self, budget: Budget, texts: str) -> None:
        self._is_full, self._texts = budget.is_full, texts
        self._limits = {
            "train": budget.size(20_000, full=45_000, least=128),
            "validation": budget.size(2_000, full=5_000, least=64),
            "test": budget.size(10_000, full=50_000, least=64),
        }

    def dataset(self, _arm: str) -> Dataset:
        return Dataset(
            "tweeteval-emoji",
            # The published validation texts are not used: they come from a different crawl.
            validation=5_000,
            limits=self._limits,
            vectors=EMOJI_VECTORS,
            options={"texts": self._texts, "across": "drop"},
        )

    def recipe(self, run: Run) -> Mapping[str, Any]:
        backbone = {"config": _STAND_IN, "pooling": "mean"}
        tokenizer = LEARNED
        if self._is_full:
            backbone = {"name": _PUBLISHED, "weights": "pretrained"}
            tokenizer = f"hub:{_PUBLISHED}"
        return {
            "seed": run.seed,
            "data": {"text": {"tokenizer": tokenizer, "max_length": 32}, "eval_split": run.split},
            "backbone": backbone,
            "head": head(run.arm),
            "optimizer": {
                "kind": "adamw",
                "lr": run.rates.lr,
                "weight_decay": run.rates.weight_decay,
            },
            "schedule": {"kind": "linear"},
            "train": {
                "duration": {"steps": run.steps},
                "global_batch": 64,
                "clip_norm": 1.0,
            },
            "evaluation": {"batch": 500},
            "checkpoint": {"every": {"steps": 1000}, "keep_last": 1},
        }


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    sizes = {
        "steps": budget.size(300, full=2_100, least=4),
        "search_steps": budget.size(100, full=700, least=2),
    }
    candidates = grid((1e-4, 3e-5) if budget.is_full else (3e-3, 1e-3), (0.01, 0.1))
    shared = Rates(3e-5 if budget.is_full else 1e-3, 0.01)
    found = {}
    # The remaining time goes to the clean texts, which the claims are about.
    for texts in ("keep", "clean"):
        comparison = Comparison(_Design(budget, texts), ARMS, candidates, shared, ("top1",))
        found[texts] = yield from comparison.procedure(
            budget, **sizes, at_least=3, at_most=10 if texts == "clean" else 3
        )
    clean, leaking = found["clean"], found["keep"]
    rows = [
        [
            arm,
            cell(clean.at_best[arm], "top1", Mean.percent),
            cell(leaking.at_best[arm], "top1", Mean.percent),
        ]
        for arm in ARMS
    ]
    samples = clean.samples["ce"]
    network = (
        f"Pretrained {_PUBLISHED} is trained"
        if budget.is_full
        else f"A BERT with {_STAND_IN['num_hidden_layers']} layer and a hidden size of "
        f"{_STAND_IN['hidden_size']} (a stand-in for LaBSE) is trained from scratch"
    )
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=(
            f"{network} on {samples['train']:,} English tweets from TweetEval's emoji task, with "
            "label vectors from emoji2vec. The paper uses its own set of multilingual tweets. "
            f"{clean.setup()} The runs on texts with U+FE0F use {leaking.seeds} seeds."
        ),
        claims=claims("twitter", clean, Kind.PAPER if budget.is_full else Kind.STAND_IN),
        tables=[
            table("Tweets, best rate of each loss", "twitter", clean, is_best=True),
            table("Tweets, shared rate", "twitter", clean, is_best=False),
            Table(
                "Top-1 % without and with the character U+FE0F in the texts",
                ["loss", "without", "with"],
                rows,
            ),
        ],
        plots=[
            plots.save(
                EXPERIMENT.name,
                figure(clean),
                title="Tweets: top-1 accuracy and similarity accuracy (SA) of three losses.",
                alt_text="Points with error bars: tree loss, cross entropy and SimLoss.",
            )
        ],
        remarks=[
            "In the published texts, some emoji were removed but left behind the character U+FE0F "
            "(variation selector), which reveals the label. All tables except the last one use "
            "texts without this character, in which user names and URLs are also masked."
        ],
    )


EXPERIMENT = Experiment(
    name="000-twitter",
    paper="000",
    title="Tree loss on tweets (Table 1)",
    minutes=3.5,
    full="pretrained LaBSE on all tweets in TweetEval (the paper's tweets are not public)",
    wants_gpu=True,
    procedure=_procedure,
    needs=(TWEETS, EMOJI_VECTORS),
)
