"""What a loss has to set besides rates, in words for the page."""

from pydantic import TypeAdapter

from heads.config import LossConfig


def loss_settings(kind: str) -> str:
    """The defaults, as `alpha 0.1, gamma 1`; nothing where there is nothing to set."""
    config = TypeAdapter[LossConfig](LossConfig).validate_python({"kind": kind})
    own = config.model_dump(exclude={"kind"})
    return ", ".join(
        f"{name} {value:g}" for name, value in own.items() if isinstance(value, int | float)
    )
