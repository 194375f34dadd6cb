"""The center of each class's scores, estimated from its own samples and those of similar classes.

The score of sample i of class j in group g is modeled as

    score = overall + group_g + class_j + noise_ij

with variances `of_groups`, `of_classes` and `of_noise` of the three terms. The best linear
predictor of the center of a class with n samples is a weighted mean (hierarchical credibility:
Buehlmann and Straub 1970, Jewell 1975):

    center = z * (mean of its n samples) + (1 - z) * (center of its group without the class)
    z      = n * of_classes / (n * of_classes + of_noise)

The center of a group is shrunk towards the overall mean in the same way. No distribution is
assumed. The variances are estimated by the method of moments. If groups explain nothing,
`of_groups` is 0 and every class is shrunk towards the overall mean.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.promises.bounds import FloatArray, IntArray


@dataclass(frozen=True)
class ClassCenters:
    """For K classes: `group_centers` [K], the center of each class's group without the class
    itself, and `num_similar` [K], the number of other classes with samples in the group.
    """

    group_centers: FloatArray
    num_similar: IntArray
    of_groups: float
    of_classes: float
    of_noise: float

    def at(
        self, classes: IntArray | slice, means: FloatArray, num_samples: NDArray[np.integer]
    ) -> FloatArray:
        """Return the centers of `classes`, given the `means` of `num_samples` own samples."""
        own = num_samples * self.of_classes
        weight = _ratio(own, own + self.of_noise)  # z
        return weight * means + (1 - weight) * self.group_centers[classes]


def class_centers(scores: FloatArray, labels: IntArray, groups: IntArray) -> ClassCenters:
    """Estimate the centers from the `scores` [N] of samples for their own classes, `labels` [N],
    and the group of each class, `groups` [K], numbered from 0. N is at least 1.
    """
    positives = np.bincount(labels, minlength=len(groups))
    is_measured = positives > 0
    means = _ratio(np.bincount(labels, scores, len(groups)), positives)
    spare = max(1, int((positives[is_measured] - 1).sum()))
    of_noise = float(((scores - means[labels]) ** 2).sum() / spare)

    own, group = means[is_measured], groups[is_measured]
    num_groups = int(groups.max()) + 1
    members = np.bincount(group, minlength=num_groups)
    sums = np.bincount(group, own, num_groups)
    # The variance of the mean of a class's samples around its center, averaged over classes.
    of_means = float((of_noise / positives[is_measured]).mean())
    group_means = _ratio(sums, members)
    spare = max(1, int((members[members > 0] - 1).sum()))
    around_group = float(((own - group_means[group]) ** 2).sum() / spare)
    used = members > 0
    around_overall = float(group_means[used].var(ddof=1)) if used.sum() > 1 else 0.0
    of_groups = max(0.0, around_overall - float((around_group / members[used]).mean()))

    similar = members[groups] - is_measured
    others = _ratio(sums[groups] - np.where(is_measured, means, 0.0), similar)
    known = similar * of_groups
    weight = _ratio(known, known + around_group)
    overall = float(own.mean())
    return ClassCenters(
        weight * others + (1 - weight) * overall,
        similar,
        of_groups,
        max(0.0, around_group - of_means),
        of_noise,
    )


def _ratio(sums: NDArray[Any], counts: NDArray[Any]) -> FloatArray:
    """Return sums / counts, and 0 where the count is 0."""
    return np.divide(sums, counts, out=np.zeros(len(sums)), where=counts > 0)
