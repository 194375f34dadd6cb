"""LAMB (You et al. 2020, arXiv 1904.00962, algorithm 2) for tensors that may be sharded."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from heads.collectives import all_reduce_sum
from trainer.optimizers.base import Beta, OptimizerKind


class LAMB(OptimizerKind):
    """Adam with layer-wise scaling: the step of each tensor is scaled so that its norm is the
    learning rate times the norm of the tensor.
    """

    needs_whole_tensors: ClassVar[bool] = True
    copies_tensors: ClassVar[bool] = True

    kind: Literal["lamb"] = "lamb"
    lr: float = Field(2e-3, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(1e-6, gt=0)

    @property
    def num_moments(self) -> int:
        return 2

    def build(
        self, groups: list[dict[str, Any]], norm_group: ProcessGroup | None = None
    ) -> Optimizer:
        # The steps of vectors (norms, biases) are not scaled, as in the authors' code.
        adapted = [
            {**group, "adapted": any(p.ndim > 1 for p in group["params"])} for group in groups
        ]
        return LambOptimizer(adapted, **self.options(), norm_group=norm_group)


class LambOptimizer(Optimizer):
    """Adam with bias correction and decoupled weight decay. The step of each tensor is scaled by
    ||w|| / ||step||.

    A parameter is a full tensor, or this rank's rows of a tensor that is sharded over the parameter
    group's `norm_group`. Norms are always computed over the full
    tensor (collective). Steps of a parameter group that is not `adapted` are not scaled.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        norm_group: ProcessGroup | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "norm_group": norm_group,
            "adapted": True,
        }
        super().__init__(params, defaults)
        # torch's flag for optimizers whose `step` reads `grad_scale` and `found_inf`
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient (collective).

        Like torch's fused optimizers, this divides gradients by the attribute `grad_scale`, and
        changes nothing if the attribute `found_inf` is 1. Both attributes are optional scalars on
        the device.
        """
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._step_group(group, parameters)
        return loss

    def _step_group(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        steps = [self._adam_step(group, p, found_inf) for p in weights]
        torch._foreach_add_(steps, weights, alpha=group["weight_decay"])
        if found_inf is not None:
            steps = [step.where(found_inf == 0, 0) for step in steps]
        if not group["adapted"]:
            torch._foreach_add_(weights, steps, alpha=-group["lr"])
            return
        for weight, step, ratio in zip(
            weights, steps, self._ratios(group, weights, steps), strict=True
        ):
            weight.sub_(step * ratio, alpha=group["lr"])

    def _adam_step(
        self, group: dict[str, Any], parameter: Tensor, found_inf: Tensor | None
    ) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        gradient, (beta1, beta2) = parameter.grad, group["betas"]
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        if grad_scale is not None:
            gradient = gradient / grad_scale
        if found_inf is None:
            state["step"] += 1
        else:
            # With a gradient of 0 and betas of 1, the moments keep their values.
            gradient = gradient.where(found_inf == 0, 0)
            beta1, beta2 = (
                torch.full_like(found_inf, beta).where(found_inf == 0, 1) for beta in (beta1, beta2)
            )
            state["step"] += 1 - found_inf
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).add_(gradient.square() * (1 - beta2))
        first, second = (1 - beta ** state["step"] for beta in group["betas"])
        return mean / first / (square / second).sqrt_().add_(group["eps"])

    def _ratios(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        steps: list[Tensor],
    ) -> Iterable[Tensor]:
        squares = torch.stack(
            [
                torch.stack([w.square().sum() for w in weights]),
                torch.stack([s.square().sum() for s in steps]),
            ]
        )
        weight_norms, step_norms = all_reduce_sum(squares, group["norm_group"]).sqrt()
        has_ratio = (weight_norms > 0) & (step_norms > 0)
        return torch.where(has_ratio, weight_norms / step_norms, 1.0)
