"""The order of samples if some groups (classes or shard sets) are sampled more often than others.

Like `Order`, `SampledOrder` is a pure function of the seed and the position in an endless stream,
so it does not depend on the number of ranks or workers, and a run can resume at any position. Each
position of an epoch is mapped to a *slot*, and each slot belongs to a group:

1. An epoch consists of N slots. `permuted_index` maps each position of the epoch to a slot.
2. The slots of an epoch are divided among the groups in proportion to their shares. Let R_g be N
   times the sum of the shares of the groups before group g. In epoch e, the slots of group g begin
   at floor(R_g + u_e), with 0 <= u_e < 1 (systematic sampling). An epoch therefore has exactly N
   slots. A group whose share is less than one slot per epoch has a slot in some of the epochs.
3. u_e runs through the multiples of 1/M, with M = 65,536, in the order of the van der Corput
   sequence. After M epochs, the number of slots of every group is its exact share of M N, and after
   fewer epochs it differs from the exact share by a few slots, at most about log2(e).
4. A group counts its slots over all epochs: draw d of a group with n samples is element d % n of
   permutation d // n of these samples. The numbers of times that the samples of a group have been
   drawn therefore never differ by more than 1.

Example: N = 8, class A has 6 samples and class B has 2. With equal shares, each epoch has 4 slots
of A and 4 of B. Epoch 0 contains 4 of the samples of A once and both samples of B twice. Epoch 1
begins with the other 2 samples of A.
"""

from typing import NamedTuple, TypeVar

import numpy as np

from data.config import DataConfig
from data.loading.order import permuted_in_groups, permuted_index
from data.shards.split import Part, Split, samples_of

# Shares are rounded to 1/_PERIOD of a slot per epoch.
_PERIOD = 1 << 16

Number = TypeVar("Number", int, np.ndarray)


class Groups(NamedTuple):
    """Groups of samples.

    sizes: the number of samples in each group, at least 1, int64 [G]. shares: the fraction of the
    stream that each group gets, float64 [G]; the sum is 1. members: the samples of all groups, one
    group after another, int32 or int64 [sum of sizes], or None if they are in ascending order.
    overlap: whether a sample may be in several groups.
    """

    sizes: np.ndarray
    shares: np.ndarray
    members: np.ndarray | None = None
    overlap: bool = False


def class_shares(counts: np.ndarray, power: float) -> np.ndarray:
    """Return the fraction of samples to draw from each class, float64 [K], proportional to
    `counts` (int64 [K]) raised to `power`. Classes without samples get 0.
    """
    present = counts > 0
    # Powers may differ in the last bits between processors, but all ranks must agree.
    raised = np.where(present, counts.astype(np.float64) ** power, 0).astype(np.float32)
    weights = raised.astype(np.float64)
    return weights / max(np.cumsum(weights)[-1], 1)


def class_groups(
    labels: np.ndarray, num_classes: int, power: float, offsets: np.ndarray | None = None
) -> Groups:
    """Return one group per class that has samples, with the shares of `class_shares`.

    labels: integers [N] or, with `offsets` [N + 1], the labels of all samples [L]. A sample is in
    the group of each of its labels. Samples without a label form the last group, whose share is
    their fraction of the samples, so that training draws an empty set as often as in natural order.
    """
    samples, num_samples = None, len(labels)
    if offsets is not None:
        num_samples = len(offsets) - 1
        empty = np.flatnonzero(np.diff(offsets) == 0)
        labels = np.concatenate([labels, np.full(len(empty), num_classes, labels.dtype)])
        samples = np.concatenate([samples_of(offsets), empty])
    counts = np.bincount(labels, minlength=num_classes + 1)
    unlabeled = counts[-1] / num_samples
    shares = np.append(class_shares(counts[:-1], power) * (1 - unlabeled), unlabeled)
    members = np.argsort(labels, kind="stable").astype(_index_type(len(labels)))
    if samples is not None:
        members = samples[members].astype(_index_type(num_samples))
    present = np.flatnonzero(counts)
    return Groups(counts[present], shares[present], members, offsets is not None)


def _index_type(num_samples: int) -> type[np.integer]:
    return np.int32 if num_samples < 2**31 else np.int64


class SampledOrder:
    """Maps each position of the endless stream to a sample, with given shares of groups.

    num_samples: positions per epoch. Uses 16 bytes per group and `groups.members`.
    """

    def __init__(self, seed: int, groups: Groups, num_samples: int) -> None:
        self.num_samples = num_samples
        self._seed = seed
        self._starts = np.concatenate([[0], np.cumsum(groups.sizes)])
        self._members = groups.members
        self._overlap = groups.overlap
        # R_g of the module docstring, in units of 1/_PERIOD: int64 [G + 1].
        shares = np.concatenate([[0.0], np.cumsum(groups.shares)])
        self._bounds = np.rint(shares / shares[-1] * num_samples * _PERIOD).astype(np.int64)
        # A cache for `_slots_below`: the number of epochs of its last call, modulo _PERIOD, and the
        # sorted offsets of these epochs.
        self._counted: tuple[int, np.ndarray] | None = None

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (pass, sample index), int64 [...] each, at `positions` (int64 [...], >= 0).

        The pass is the number of times that the sample occurs earlier in the stream or, if groups
        overlap, another number that differs each time it occurs.
        """
        positions = np.asarray(positions, dtype=np.int64)
        epochs, inside = np.divmod(positions, self.num_samples)
        groups, draws = np.empty_like(positions), np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            slots = permuted_index(self._seed, epoch, inside[here], self.num_samples)
            groups[here], draws[here] = self._draws(epoch, slots)
        sizes = self._starts[groups + 1] - self._starts[groups]
        passes, drawn = np.divmod(draws, sizes)
        rows = permuted_in_groups(
            self._seed, *(each.reshape(-1) for each in (groups, passes, drawn, sizes))
        )
        samples = self._starts[groups] + rows.reshape(groups.shape)
        if self._overlap:
            passes = passes * (len(self._starts) - 1) + groups
        return passes, samples if self._members is None else self._members[samples].astype(np.int64)

    def _draws(self, epoch: int, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (group, draw), int64 [n] each, at `slots` (int64 [n]) of an epoch."""
        offset = _offset(epoch % _PERIOD)
        # Group g begins at slot (bounds[g] + offset) // _PERIOD. Find the last g that begins at or
        # before the slot. It is not empty, because group g + 1 begins after the slot.
        groups = np.searchsorted(self._bounds, (slots + 1) * _PERIOD - offset, side="left") - 1
        lower, upper = self._bounds[groups], self._bounds[groups + 1]
        earlier = self._slots_below(epoch, upper) - self._slots_below(epoch, lower)
        return groups, earlier + slots - (lower + offset) // _PERIOD

    def _slots_below(self, epochs: int, bounds: np.ndarray) -> np.ndarray:
        """Return the sum of (bounds + offset of e) // _PERIOD over the first `epochs` epochs e,
        int64 [n].
        """
        periods, rest = divmod(epochs, _PERIOD)
        if self._counted is None or self._counted[0] != rest:
            self._counted = rest, np.sort(_offset(np.arange(rest)))
        whole, fraction = np.divmod(bounds, _PERIOD)
        # In a period, each offset occurs once, so the sum is `bounds` (Hermite's identity). In the
        # rest, an offset adds a slot if it is at least _PERIOD - fraction.
        added = rest - np.searchsorted(self._counted[1], _PERIOD - fraction, side="left")
        return periods * bounds + rest * whole + added


def _offset(number: Number) -> Number:
    """Return the `number`-th element of the van der Corput sequence times _PERIOD: `number` with
    its 16 bits reversed.
    """
    for shift, mask in ((1, 0x5555), (2, 0x3333), (4, 0x0F0F), (8, 0x00FF)):
        number = (number >> shift & mask) | (number & mask) << shift
    return number


def samples_per_epoch(training: Split, config: DataConfig) -> int:
    """Return the number of positions per epoch in training."""
    return config.sampling.epoch_samples or len(training)


def training_counts(training: Split, config: DataConfig) -> np.ndarray:
    """Return the expected number of samples of each class in an epoch of training, [K].

    Priors and balanced weights correct for the classes that the model sees in training, so they
    depend on these numbers and not on the counts in the shards.
    """
    if not config.is_sampled:
        return training.class_counts()
    if training.offsets is not None:
        # A draw from the group of one class also contains the other classes of the sample.
        groups = _groups(training, config.sampling.power)
        each = np.repeat(groups.shares / groups.sizes, groups.sizes)
        weights = each
        if groups.members is not None:
            weights = np.bincount(groups.members, each, len(training))
        of_labels = weights[samples_of(training.offsets)]
        shares = np.bincount(training.labels, of_labels, training.num_classes)
        return shares * samples_per_epoch(training, config)
    total = np.zeros(training.num_classes)
    for part, labels, _, share in _parts(training):
        num_classes = training.num_classes if part.labels is None else len(part.labels)
        counts = np.bincount(labels, minlength=num_classes)
        shares = class_shares(counts, config.sampling.power)
        total[slice(None) if part.labels is None else part.labels] += share * shares
    return total * samples_per_epoch(training, config)


def sampled_order(training: Split, config: DataConfig, seed: int) -> SampledOrder:
    """Return the order of training if `config.is_sampled`."""
    groups = _groups(training, config.sampling.power)
    return SampledOrder(seed, groups, samples_per_epoch(training, config))


def _parts(training: Split) -> list[tuple[Part, np.ndarray, np.ndarray | None, float]]:
    """Return each part with its labels, their offsets and the fraction of the stream that it
    gets.
    """
    weights = np.array([part.weight for part in training.parts], np.float64)
    shares = weights / np.cumsum(weights)[-1]
    found = zip(training.parts, training.labels_of_parts(), shares.tolist(), strict=True)
    return [(part, *labels, share) for part, labels, share in found]


def _groups(training: Split, power: float) -> Groups:
    """Return one group per part or, if `power` is not 1, one per part and class."""
    parts = _parts(training)
    num_samples = [sum(info.samples for info in part.shards) for part, *_ in parts]
    if power == 1:
        return Groups(np.array(num_samples), np.array([share for *_, share in parts]))
    groups, first = [], 0
    for (part, labels, offsets, share), size in zip(parts, num_samples, strict=True):
        num_classes = training.num_classes if part.labels is None else len(part.labels)
        own = class_groups(labels, num_classes, power, offsets)
        # Convert before adding: the sums may not fit in the index type of a small part.
        assert own.members is not None
        members = own.members.astype(_index_type(len(training)), copy=False)
        members += first
        groups.append((own.sizes, own.shares * share, members))
        first += size
    sizes, shares, members = (np.concatenate(column) for column in zip(*groups, strict=True))
    return Groups(sizes, shares, members, training.label_sets)
