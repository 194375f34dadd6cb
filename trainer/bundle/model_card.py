"""The section of a model card that describes the thresholds."""

import re
from collections.abc import Iterator

import numpy as np

from trainer.bundle.thresholds import ClassThresholds
from trainer.promises import KINDS

_HEADING = "## Thresholds"
_NEXT = "## Use"
NO_THRESHOLDS = f"""{_HEADING}

The bundle has no thresholds, so queries return scores. `kway calibrate BUNDLE SHARDS` adds
thresholds from labeled samples.
"""


def thresholds_section(thresholds: ClassThresholds) -> str:
    """Return the explanation of the kinds of thresholds, and a table of how many classes have
    which kind.
    """
    confidence = thresholds.recalls[0].confidence
    rows = "\n".join(_promise_rows(thresholds))
    return f"""{_HEADING}

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


def with_thresholds(
    card: str, thresholds: ClassThresholds, *, source: str, num_samples: int, accuracy: float
) -> str:
    """Return a model card whose section about thresholds is replaced, or added before `## Use`.

    It states the `source` of the samples and the top-1 accuracy on them.
    """
    section = (
        f"{thresholds_section(thresholds)}\nMeasured on {num_samples} samples of {source}: top-1 "
        f"accuracy {accuracy:.4f}.\n"
    )
    without = re.sub(rf"^{_HEADING}\n.*?(?=^## |\Z)", "", card, flags=re.MULTILINE | re.DOTALL)
    before, heading, after = without.partition(f"{_NEXT}\n")
    return f"{before.rstrip()}\n\n{section}\n{heading}{after}".rstrip() + "\n"


def _promise_rows(thresholds: ClassThresholds) -> Iterator[str]:
    assert thresholds.reached is not None
    assert thresholds.kinds is not None
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
