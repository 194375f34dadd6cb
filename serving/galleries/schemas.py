"""What a search of a gallery answers, to servers and clients alike. Free of torch."""

from pydantic import BaseModel, Field

from serving.schemas import ClassThreshold, Verdict


class Hit(Verdict):
    """A class for one item of a gallery."""

    item: int = Field(description="the item's index in the gallery")
    name: str = Field(description="its path in the collection, or the number of its line")
    text: str | None = Field(description="of a text: its beginning")


class ClassHits(ClassThreshold):
    """A page of the items that a class scores highest, in that order."""

    total: int = Field(description="items to page over: those that match, or all of them")
    matches: int | None = Field(
        description="items whose score reaches the threshold; null without one"
    )
    hits: list[Hit]


class Hits(BaseModel):
    """What a gallery holds of each class, in the order of the classes asked for."""

    aligned: bool
    notice: str | None
    num_items: int
    results: list[ClassHits]
