"""Where samples come from."""

from data.sources.glyphs import Glyphs
from data.sources.imagefolder import ImageFolder
from data.sources.source import Sample, Source

SOURCES: dict[str, type[Source]] = {"glyphs": Glyphs, "imagefolder": ImageFolder}

__all__ = ["SOURCES", "Glyphs", "ImageFolder", "Sample", "Source"]
