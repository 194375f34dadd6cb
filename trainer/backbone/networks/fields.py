"""What the networks' configurations check, before a weight is made."""

from collections.abc import Sequence

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


def check_positive(**fields: int | Sequence[int]) -> None:
    """Raise ValueError for a field that is not a positive number, or a list of some."""
    for name, value in fields.items():
        numbers = [value] if isinstance(value, int) else value
        if min(numbers, default=0) < 1:
            raise ValueError(f"{name} is {value}: every number of it must be at least 1")


def check_dropout(dropout: float) -> None:
    """Raise ValueError for what is not the probability to drop an activation."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}: give a probability below 1; 0 is none")


def layers_a_stage(depth: int, *, step: int, outside: int) -> int:
    """The n of `depth` = `step` n + `outside`; ValueError where there is none."""
    n, rest = divmod(depth - outside, step)
    if rest or n < 1:
        lower = step * max(n, 1) + outside
        raise ValueError(
            f"depth is {depth} and must be {step} n + {outside}: choose {lower} or {lower + step}"
        )
    return n


@strict
class FixedSizeConfig(PreTrainedConfig):
    """Of a network that takes pictures of one size alone: a layer has a weight for each pixel."""

    image_size: int = 32
    num_channels: int = 3

    def __post_init__(self, **kwargs: object) -> None:
        check_positive(image_size=self.image_size, num_channels=self.num_channels)
        super().__post_init__(**kwargs)

    def check_picture(self, height: int, width: int) -> None:
        """Raise ValueError for a picture of another size, pixels."""
        if (height, width) != (self.image_size, self.image_size):
            raise ValueError(
                f"backbone.config.image_size is {self.image_size}, pictures have {height} x "
                f"{width} pixels and {self.model_type} takes one size alone: make it and "
                "data.image.size equal, and leave out other sizes of data.augment"
            )
