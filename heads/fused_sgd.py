"""SGD that updates the class rows of a head while their gradient is computed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from heads.head import ClassHead
from heads.rows.row_update import RowUpdate, descended


class FusedSGD(Optimizer):
    """SGD without momentum for all parameters of `head`.

    The class rows [n, d] are updated block by block, so they have no gradient `weight.grad` and no
    moments. bf16 and fp8 rows are rounded at random (`heads/rows/rounding.py`), as a function of
    the head's `seed` and `draw`. Weight decay is added to the gradient, except for a learned scale
    or offset, whose groups have the rate `lr` times their `lr_factor` (`ClassHead.sgd_rates`).

    Without `deferred`, `loss.backward()` updates the rows with the current `lr` of
    `param_groups[0]`, unless the loss is not finite. `step` updates the other parameters.

    With `deferred`, `step` updates the rows. It computes their gradient again, at the cost of one
    more product if `needs_norm` is false and two more if it is true. With `needs_norm`,
    `head.squared_gradient_norm()` covers the rows. Like torch's fused optimizers, `step` divides
    all gradients by the attribute `grad_scale`, and changes nothing if the attribute `found_inf` is
    1, or if it is set and the norm of the rows' gradient is not finite. So `torch.amp.GradScaler`
    works, except for `unscale_`. Without `deferred`, `found_inf` does not apply to the rows, and a
    `GradScaler` raises RuntimeError in `step`.

    A backward pass that does not require the gradient of the rows, such as
    `torch.autograd.grad(loss, features)`, does not count as one and changes nothing. Each other
    backward pass must be followed by `step` or `zero_grad`. Set `head.row_update = None` to
    train the head with another optimizer again. If the loss computes only some of the classes in
    a step, calling the head with a `weight_decay` above 0 raises ValueError, because the rows of
    the other classes would not decay.

    >>> head = ClassHead(512, 1_000_000, CrossEntropy(), dtype=torch.bfloat16)
    >>> optimizer = FusedSGD(head, lr=0.1)
    """

    def __init__(
        self,
        head: ClassHead,
        *,
        lr: float,
        weight_decay: float = 0.0,
        deferred: bool = False,
        needs_norm: bool = True,
    ) -> None:
        if not isinstance(head, ClassHead) or not head.supports_row_update:
            raise TypeError(
                f"FusedSGD cannot update a {type(head).__name__}: pass a ClassHead, or use another "
                "optimizer"
            )
        for name, value in {"lr": lr, "weight_decay": weight_decay}.items():
            if not value >= 0:
                raise ValueError(f"{name} is {value}: it must be at least 0")
        factors = head.sgd_rates()
        groups = [
            {
                "params": [parameter],
                "weight_decay": weight_decay if parameter.ndim else 0.0,
                "lr": lr * factors[name],
                "lr_factor": factors[name],
            }
            for name, parameter in head.named_parameters()
        ]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        assert groups[0]["params"] == [head.weight]
        self._head = head
        self._update = RowUpdate(self.param_groups[0], deferred=deferred, needs_norm=needs_norm)
        head.row_update = self._update
        # torch's flag for optimizers whose `step` reads `grad_scale` and `found_inf`
        self._step_supports_amp_scaling = True

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_head": self._head, "_update": self._update}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._update.group = self.param_groups[0]  # `load_state_dict` replaces the groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, and discard the state of a backward pass without a `step`."""
        super().zero_grad(set_to_none)
        self._update.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that backward did not update (collective if `deferred`).

        Raises RuntimeError if a newer `FusedSGD` updates the class rows of the head, and for a loss
        scale by which the gradient of the rows cannot be divided.
        """
        if self._head.row_update is not self._update:
            raise RuntimeError(
                "another FusedSGD was created for the same head: use only the newest one"
            )
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        divisor: Tensor | None = getattr(self, "grad_scale", None)
        # After `unscale_`, a GradScaler sets `grad_scale` to None.
        if hasattr(self, "grad_scale") and (divisor is None or not self._update.deferred):
            raise RuntimeError(
                "a GradScaler can divide the gradient of the class rows only in step: use "
                "FusedSGD(deferred=True), and do not call unscale_"
            )
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        skipped = None if found_inf is None else found_inf != 0
        norm = self._update.squared_norm
        if skipped is not None and norm is not None:
            # A GradScaler does not find infinities in the rows, because they have no `.grad`.
            skipped = ~norm.isfinite() | skipped
        self._update.apply(divisor, skipped)  # first, because it computes the logits again
        for group in self.param_groups[1:]:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    new = descended(
                        parameter,
                        parameter.grad,
                        lr=group["lr"],
                        weight_decay=group["weight_decay"],
                        divisor=divisor,
                        skipped=skipped,
                    )
                    parameter.copy_(new)
        return loss
