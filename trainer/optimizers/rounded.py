"""An optimizer for bf16 class rows, whose moments are bf16 too."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heads import ClassHead
from heads.rows.hashing import random_bits, rows_at_once
from heads.rows.rounding import rounded

# The random numbers of a step for the weights and up to seven moments have different seeds.
_SEEDS_PER_STEP = 8


class RoundedOptimizer(Optimizer):
    """Steps of another optimizer, which `build(groups)` creates, for the parameters of a head with
    bf16 rows.

    The optimizer must be elementwise. It computes float32 rows, piece by piece, from those in bf16.
    The new rows and moments are rounded at random (`heads/rows/rounding.py`), as a function of the
    head's `seed` and `draw`, because rounding to the nearest number would lose small changes. All
    other parameters are float32. `groups` has one parameter group per parameter, of which the first
    one contains the rows.
    """

    def __init__(
        self,
        head: ClassHead,
        groups: list[dict[str, Any]],
        build: Callable[[list[dict[str, Any]]], Optimizer],
    ) -> None:
        rows, *others = groups
        assert rows["params"] == [head.weight]
        self._head = head
        self._piece = nn.Parameter(head.weight.new_empty(0, head.dim, dtype=torch.float32))
        self._of_piece = build([{**rows, "params": [self._piece]}])
        self._of_others = build(others) if others else None
        group = {**self._of_piece.param_groups[0], "params": [head.weight]}
        shared = [] if self._of_others is None else self._of_others.param_groups
        super().__init__([group, *shared], {})
        if self._of_others is not None:
            self._of_others.state = self.state
        # torch's flag for optimizers whose `step` reads `grad_scale` and `found_inf`
        self._step_supports_amp_scaling = getattr(
            self._of_piece, "_step_supports_amp_scaling", False
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient. The attributes `grad_scale` and `found_inf`
        are passed on to the other optimizer."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        flags = {
            name: getattr(self, name) for name in ("grad_scale", "found_inf") if hasattr(self, name)
        }
        for optimizer in (self._of_piece, self._of_others):
            for name in ("grad_scale", "found_inf") if optimizer is not None else ():
                setattr(optimizer, name, flags.get(name))
        weight = self._head.weight
        if weight.grad is not None:
            state = self._state()
            seed = (self._head.seed << 32) + self._head.draw * _SEEDS_PER_STEP
            at_once = rows_at_once(self._head.dim, weight.device)
            # Every piece starts from the state before the step. The first piece may add entries.
            before = {name: None if value.ndim else value.clone() for name, value in state.items()}
            for start in range(0, len(weight), at_once):
                self._step_rows(slice(start, start + at_once), before, seed % 2**63)
        if self._of_others is not None:
            self._of_others.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise NotImplementedError, because the inner optimizers share the state and would keep
        the old one. Checkpoints restore its tensors in place."""
        raise NotImplementedError(
            "the state of an optimizer of bf16 class rows cannot be replaced: copy its tensors"
        )

    def _state(self) -> dict[str, Tensor]:
        """Return the state of the rows, with zeros before the first step."""
        state, group = self.state[self._head.weight], self.param_groups[0]
        if not state and group.get("momentum"):
            # torch's SGD does not initialize the buffer if a step is skipped.
            state["momentum_buffer"] = torch.zeros_like(self._head.weight)
        return state

    def _step_rows(self, part: slice, before: dict[str, Tensor | None], seed: int) -> None:
        """Update some rows. `before` are the scalars of the state before the step, and None for its
        moments."""
        weight, piece, inner = self._head.weight, self._piece, self._of_piece
        state = self.state[weight]
        inner.param_groups[0] = {**self.param_groups[0], "params": [piece]}
        assert weight.grad is not None
        piece.data, piece.grad = weight[part].float(), weight.grad[part].float()
        inner.state[piece] = {
            name: state[name][part].float() if scalar is None else scalar.clone()
            for name, scalar in before.items()
        }
        inner.step()
        first = self._head.engine.weights.start + (part.start or 0)
        ids = torch.arange(first, first + len(piece), device=weight.device)
        moments = inner.state[piece]
        for name, value in moments.items():
            if not value.ndim:
                state[name] = value
            elif name not in state:
                state[name] = torch.zeros_like(weight)
        matrices = [(weight, piece.data)]
        matrices += [(state[name], value) for name, value in moments.items() if value.ndim]
        for index, (target, values) in enumerate(matrices):
            bits = random_bits(ids, self._head.dim, 16, seed=seed + index)
            target[part] = rounded(values, target.dtype, bits)
