"""A frame of a feed: one picture or text, and what the feed says of it."""

from dataclasses import dataclass

from serving.errors import ApiError


@dataclass(frozen=True)
class Frame:
    """`id`: the feed's or, without one, its place; `content`: what the model reads, or what is
    wrong with it."""

    id: str | int
    content: bytes | str | ApiError
    time: str | int | float | None = None
