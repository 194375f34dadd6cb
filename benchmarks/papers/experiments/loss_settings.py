"""What a loss has to set besides rates, in words for the page."""

from heads.losses import LOSSES


def loss_settings(kind: str) -> str:
    """The defaults, as `alpha 0.1, gamma 1`; nothing where there is nothing to set."""
    own = ((name, field.default) for name, field in LOSSES[kind].option_fields().items())
    return ", ".join(f"{name} {value:g}" for name, value in own if isinstance(value, int | float))
