"""The classes of a plan: their number, the size of their label tree, and the number of samples.

The numbers come from the shards if the shards are on this machine, otherwise from the command line.
Nothing of size K is allocated.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from data.loading.sampling import sample_list_bytes
from data.remote.config import is_url
from data.shards.manifest import MANIFEST, ClassInfo, Manifest
from data.shards.mixture import read_manifests, united_manifest
from trainer.config import Recipe

_INSPECTED = 1000
_ASSUMED = ClassInfo(name="a" * 24)


@dataclass(frozen=True)
class Classes:
    """Upper bounds for the nodes of the label tree.

    nodes: nodes to shard; inner: nodes with children; depth: mean number of nodes on the path of a
    class; boundary: nodes that ranks other than their owners need.
    """

    num_classes: int
    nodes: int
    depth: float = 1.0
    boundary: int = 0
    inner: int = 0

    @property
    def plain(self) -> bool:
        """Whether no class row is a sum of several nodes."""
        return not self.inner


def shards_of(recipe: Recipe) -> Manifest | None:
    """Return the manifest of the recipe's shards, with the classes of a mixture, or None if they
    are not on this machine.
    """
    data = recipe.data
    if any(is_url(folder) or not (Path(folder) / MANIFEST).is_file() for folder in data.addresses):
        return None
    own, *others = read_manifests(data)
    return united_manifest(data, own, others)


def num_samples(recipe: Recipe, manifest: Manifest | None, given: int | None) -> int | None:
    """Return the number of training samples per epoch, or None if unknown."""
    if given is not None:
        return given
    if recipe.data.stream is not None:
        return recipe.data.stream.samples
    return recipe.data.sampling.epoch_samples or stored_samples(recipe, manifest)


def stored_samples(recipe: Recipe, manifest: Manifest | None) -> int | None:
    """Return the number of samples in the training splits of the shards, or None if unknown."""
    if manifest is None:
        return None
    if not recipe.data.mixture:
        shards = [*manifest.of_split(recipe.data.train_split, key="data.train_split")]
        return sum(shard.samples for shard in shards)
    sets = zip(recipe.data.mixture, read_manifests(recipe.data)[1:], strict=True)
    return sum(shard.samples for one, own in sets for shard in own.of_split(one.split))


def classes_of(
    recipe: Recipe, manifest: Manifest | None, given: int | None, *, class_ranks: int
) -> Classes:
    """Return the class counts of a run. Trees are not built: the bounds are those of a U-tree with
    one node per class, or of a V-tree in which all inner nodes have two children.

    Raises ValueError if neither `given` nor the recipe nor the shards determine the number.
    """
    known = len(manifest.classes) if manifest is not None else recipe.head.num_classes
    num = given if given is not None else known
    if num is None:
        raise ValueError(
            f"{recipe.data.shards} contains no manifest.json, so the number of classes is unknown: "
            "pass --classes"
        )
    if recipe.head.weights.kind in ("dense", "factored"):
        return Classes(num, num)
    if recipe.head.loss.over_nodes:  # each node is a column of the logits
        return Classes(num, 2 * num - 1)
    levels = max(1, (num - 1).bit_length())
    nodes = num if recipe.head.weights.kind == "utree" else 2 * num - 1
    boundary = min(nodes, (class_ranks - 1) * levels)
    return Classes(num, nodes, levels + 1.0, boundary, num - 1)


def data_bytes(
    recipe: Recipe, manifest: Manifest | None, samples: int | None, classes: Classes
) -> tuple[int, int]:
    """Return the bytes of the label vectors and of the list of samples, which every rank stores."""
    vectors = listed = 0
    if manifest is not None and manifest.label_vectors is not None:
        path = Path(recipe.data.shards) / manifest.label_vectors
        vectors = path.stat().st_size if path.is_file() else 0
    if recipe.data.sampling.power != 1:
        num, stored = classes.num_classes, stored_samples(recipe, manifest) or samples or 0
        listed = sample_list_bytes(recipe.data, num_samples=stored, num_classes=num)
    return vectors, listed


def class_list_bytes(manifest: Manifest | None) -> tuple[float, float]:
    """Return the bytes of main memory per class while the manifest is parsed, and afterwards.

    Measured with 100,000 and 1,000,000 classes: the objects of a class, and in addition its share
    of the file and of the mappings and the ASCII JSON of which the checksum is computed. Without a
    manifest, names have 24 characters.
    """
    classes = (_ASSUMED,) if manifest is None else manifest.classes
    inspected = classes[:: max(1, len(classes) // _INSPECTED)]
    parsing = kept = 0
    for info in inspected:
        own, mappings = 591 + sys.getsizeof(info.name), 440
        if info.attributes:
            own += 139 + sum(map(sys.getsizeof, info.attributes.values()))
            mappings += 300
        kept += own
        text = json.dumps(info.model_dump())
        parsing += own + mappings + len(info.model_dump_json().encode()) + 2 * len(text)
    return parsing / len(inspected), kept / len(inspected)
