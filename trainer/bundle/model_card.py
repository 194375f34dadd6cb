"""The model card of a bundle, and its section about the thresholds."""

import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from data.messages import kway_command
from trainer.bundle.spec import BundleSpec
from trainer.bundle.threshold_file import ClassThresholds
from trainer.promises import KINDS

NO_THRESHOLDS = """## Thresholds

The bundle has no thresholds, so queries return scores. `kway calibrate BUNDLE SHARDS` adds
thresholds from labeled samples.
"""


def model_card(
    title: str,
    origin: str,
    facts: Mapping[str, str],
    spec: BundleSpec,
    example: str,
    sections: Iterable[str],
) -> str:
    """Return the model card of a new bundle. `origin` states how it was created, `facts` are rows
    of its table, and `example` is the name of a class.
    """
    query = "IMAGE"
    if spec.image is not None:
        size, channels, crops = spec.image.size, spec.image.channels, spec.image.crops
        reads = f"images, {size} x {size} x {channels}"
        reads += f", the mean of {crops} crops" if crops > 1 else ""
    else:
        assert spec.text is not None
        query = '--text "TEXT"'
        reads = f"texts, truncated to {spec.text.max_length} tokens of `tokenizer/`"
    alignment = (
        "aligned with the Principle of Logit Separation: a single logit is comparable across inputs"
        if spec.loss.aligned
        else "NOT aligned with the Principle of Logit Separation: a single logit may be "
        "misleading; prefer a model trained with `batch_ce` or `bce` for single-class queries"
    )
    rows = {**facts, "loss": f"{spec.loss.kind}, {alignment}", "input": reads}
    # A `|` would begin another cell.
    cells = ((name, value.replace("|", r"\|")) for name, value in rows.items())
    table = "\n".join(f"| {name} | {value} |" for name, value in cells)
    described = "\n".join(sections)
    return f"""# {title}

A classifier for {spec.num_classes} classes, {origin}

| | |
|---|---|
{table}

{described}
## Use

    {kway_command("query", "BUNDLE", "--class", example)} {query}
    kway serve BUNDLE
"""


def thresholds_section(thresholds: ClassThresholds) -> str:
    """Return the explanation of the kinds of thresholds, and a table of how many classes have
    which kind.
    """
    confidence = thresholds.recalls[0].confidence
    rows = "\n".join(_promise_rows(thresholds))
    return f"""## Thresholds

The kind of a class's threshold states what it promises at a recall, if new samples come from the
distribution of this split. With confidence {confidence:g}, `guaranteed` means that at least the
recall's fraction of new samples of the class pass. `shrunk` is an estimate from the class and
similar classes, and `pooled` is one threshold for all classes; neither is a guarantee for the
class. The last two columns are means over the classes with samples: the fraction of the class's
samples that pass, and the fraction of the passing samples that belong to the class (expected
precision).

| recall | kind | classes | samples that pass | expected precision |
|---|---|---|---|---|
{rows}
"""


def with_section(card: str, section: str) -> str:
    """Return a model card with a section, which replaces the one with the same heading. A new
    section is added before `## Use`.
    """
    heading = section.partition("\n")[0]
    parts = re.split("^(?=## )", card, flags=re.MULTILINE)
    parts = [part for part in parts if part.partition("\n")[0] != heading]
    at = next((at for at, part in enumerate(parts) if part.startswith("## Use\n")), len(parts))
    parts.insert(at, section)
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _promise_rows(thresholds: ClassThresholds) -> Iterator[str]:
    assert thresholds.reached is not None
    for column, entry in enumerate(thresholds.recalls):
        of_class, of_any = thresholds.reached[:, column].T
        for number, kind in enumerate(KINDS):
            used = thresholds.kinds[:, column] == number
            measured = used & (thresholds.positives > 0)
            passing = precision = "-"
            if measured.any():
                passing = f"{(of_class[measured] / thresholds.positives[measured]).mean():.3f}"
                precision = f"{(of_class[measured] / np.maximum(of_any[measured], 1)).mean():.3f}"
            yield f"| {entry.recall:g} | {kind} | {int(used.sum())} | {passing} | {precision} |"
