"""The default settings of a loss as text for the page."""

from heads.losses import LOSSES


def loss_settings(kind: str) -> str:
    """Return the numeric defaults, such as `alpha 0.1, gamma 1`; empty if the loss has none."""
    own = ((name, field.default) for name, field in LOSSES[kind].option_fields().items())
    return ", ".join(f"{name} {value:g}" for name, value in own if isinstance(value, int | float))
