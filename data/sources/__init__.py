"""Sources of samples, and the registry of the sources that `kway shard` offers."""

from data.sources.cifar import Cifar10, Cifar100
from data.sources.emoji_names import EmojiNames
from data.sources.glyphs import Glyphs
from data.sources.hugging_face import HuggingFace
from data.sources.imagefolder import ImageFolder
from data.sources.imagenet import ImageNet
from data.sources.mnist import Mnist
from data.sources.source import Sample, Source
from data.sources.table import Table
from data.sources.tweets import Tweets

SOURCES: dict[str, type[Source]] = {
    source.kind: source
    for source in (
        Glyphs,
        ImageFolder,
        Table,
        HuggingFace,
        ImageNet,
        Cifar100,
        Cifar10,
        Mnist,
        Tweets,
        EmojiNames,
    )
}

__all__ = [
    "SOURCES",
    "Cifar10",
    "Cifar100",
    "EmojiNames",
    "Glyphs",
    "HuggingFace",
    "ImageFolder",
    "ImageNet",
    "Mnist",
    "Sample",
    "Source",
    "Table",
    "Tweets",
]
