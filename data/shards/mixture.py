"""The manifest and the training split of a recipe, which may be a mixture of several sets.

The classes of a mixture are identified by their names: first the classes of `data.shards`, in its
order, and then the classes that only the sets of `data.mixture` contain, in the order of the sets
and of their class lists. Labels of `data.shards`, which provides the evaluation split, therefore do
not change. `data/loading/sampling.py` defines how often each set is sampled.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence

from data.classes.class_list import ClassList
from data.classes.columns import write_columns
from data.config import DataConfig
from data.remote.cache import Cache
from data.remote.config import CacheConfig
from data.shards.manifest import MAX_INLINE_CLASSES, Manifest
from data.shards.split import Part, Split

_log = logging.getLogger("kway.data")


def load_manifest(data: DataConfig, *, notice: Callable[[str], None] | None = None) -> Manifest:
    """Return the manifest of `data.shards`. Its class list includes the classes of the mixture.

    If a set adds classes, the result has no label vectors, because the file of `data.shards` does
    not contain vectors for these classes. notice: called with a line that states this, if
    `data.shards` has label vectors. Raises the errors of `Manifest.load`, and ValueError if the
    modalities differ, or if only some of the sets have sets of labels.
    """
    manifest, *others = manifests = [Manifest.load(each, data.cache) for each in data.addresses]
    kinds = {True: "a set of labels per sample", False: "one label per sample"}
    for mixed, other in zip(data.mixture, others, strict=True):
        if other.label_sets != manifest.label_sets:
            raise ValueError(
                f"data.mixture: {mixed.shards} has {kinds[other.label_sets]}, but {data.shards} "
                f"has {kinds[manifest.label_sets]}: write one of them again"
            )
        if other.modality != manifest.modality:
            raise ValueError(
                f"data.mixture: {mixed.shards} contains {other.modality}s, but {data.shards} "
                f"contains {manifest.modality}s: mix sets of the same modality"
            )
    classes = _united_classes(manifests, data.cache) if others else manifest.classes
    if (num_added := len(classes) - len(manifest.classes)) == 0:
        return manifest
    if notice is not None and manifest.label_vectors is not None:
        notice(
            f"data.mixture adds {num_added:,} classes without label vectors to {data.shards}: "
            "label vectors are not used"
        )
    absent = dict.fromkeys(("label_vectors", "label_vectors_sha256", "class_file"))
    return manifest.model_copy(update={"classes": classes, **absent})


def _united_classes(manifests: Sequence[Manifest], config: CacheConfig) -> ClassList:
    """Return the classes of all sets. The first process of a machine that needs a long united list
    writes it to the cache, and all processes map the file. Without a writable cache folder of
    sufficient size, the list is kept in the memory of this process.
    """

    def united() -> ClassList:
        classes = manifests[0].classes
        for other in manifests[1:]:
            classes, _ = classes.united(other.classes)
        return classes

    if sum(len(one.classes) for one in manifests) <= MAX_INLINE_CLASSES:
        return united()
    of_sets = " ".join(one.fingerprint() for one in manifests)
    name = f"{hashlib.sha256(of_sets.encode()).hexdigest()}.classes"
    try:
        cache = Cache(config.folder, config.max_bytes)
        return cache.read(name, lambda f: write_columns(f, united().columns), ClassList.open)
    except OSError as error:
        _log.warning("%s; keeping the class list of the mixture in memory", error)
    return united()


def open_mixture(data: DataConfig, manifest: Manifest) -> Split:
    """Open the splits of `data.mixture` as one. manifest: the result of `load_manifest`.

    Raises the errors of `open_split`.
    """
    parts = []
    for number, one in enumerate(data.mixture):
        own = Manifest.load(one.shards, data.cache)
        shards = own.of_split(one.split, key=f"data.mixture[{number}].split")
        labels = manifest.classes.find_all(own.classes.names)
        parts.append(Part(one.shards, one.split, shards, labels, one.weight))
    return Split(parts, manifest, data.cache)
