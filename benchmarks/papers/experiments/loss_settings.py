"""What a loss has to set besides rates, in words for the page."""

from heads.config import loss_config


def loss_settings(kind: str) -> str:
    """The defaults, as `alpha 0.1, gamma 1`; nothing where there is nothing to set."""
    own = loss_config(kind).model_dump(exclude={"kind"})
    return ", ".join(
        f"{name} {value:g}" for name, value in own.items() if isinstance(value, int | float)
    )
