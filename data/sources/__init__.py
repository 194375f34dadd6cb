"""Where samples come from."""

from data.sources.cifar import Cifar10, Cifar100
from data.sources.emoji_names import EmojiNames
from data.sources.glyphs import Glyphs
from data.sources.imagefolder import ImageFolder
from data.sources.imagenet import ImageNet
from data.sources.labelled_texts import LabelledTexts
from data.sources.mnist import Mnist
from data.sources.source import Sample, Source
from data.sources.table import Table
from data.sources.tweets import Tweets

SOURCES: dict[str, type[Source]] = {
    "glyphs": Glyphs,
    "imagefolder": ImageFolder,
    "imagenet": ImageNet,
    "cifar100": Cifar100,
    "cifar10": Cifar10,
    "mnist": Mnist,
    "tweets": Tweets,
    "labelled-texts": LabelledTexts,
    "table": Table,
    "emoji-names": EmojiNames,
}

__all__ = [
    "SOURCES",
    "Cifar10",
    "Cifar100",
    "EmojiNames",
    "Glyphs",
    "ImageFolder",
    "ImageNet",
    "LabelledTexts",
    "Mnist",
    "Sample",
    "Source",
    "Table",
    "Tweets",
]
