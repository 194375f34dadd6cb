"""What a client reads of a server's answers, where that is not the whole of them."""

from typing import Literal

from pydantic import BaseModel, PositiveInt


class Limits(BaseModel):
    """What one request, and one frame, may hold."""

    max_inputs: PositiveInt
    max_text_chars: PositiveInt
    max_body_bytes: PositiveInt
    max_frame_bytes: PositiveInt | None = None  # older servers do not say it


class Served(BaseModel):
    """What a question needs to know of the model that is served."""

    reads: Literal["pictures", "texts"]
    recalls: list[float]
    limits: Limits


class ClassFound(BaseModel):
    id: int
    name: str


class ClassesFound(BaseModel):
    """Some of the `total` classes that a search found."""

    total: int
    classes: list[ClassFound]


class GalleryFound(BaseModel):
    name: str
    num_items: int
    reads: Literal["pictures", "texts"]
    thumbnails: bool


class GalleriesFound(BaseModel):
    galleries: list[GalleryFound]
