"""A head in a training loop that is not kway's: clipping, and `HeadIntegration` for libraries."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from heads.collectives import all_reduce_sum
from heads.dtensors import local
from heads.factored import FactoredHead
from heads.gradients import squared_norm, sum_gradients, sum_sharded_gradients
from heads.head import ClassHead

_MOMENT = "optimizer."


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor], head: ClassHead | Iterable[ClassHead], max_norm: float | Tensor
) -> Tensor:
    """Clip the norm of all gradients of `parameters` and of one or more heads to `max_norm`, and
    return the norm before clipping, a float64 scalar that is the same on every rank (collective).

    `torch.nn.utils.clip_grad_norm_` would use only this rank's class rows, so that the ranks scale
    the gradient of the backbone differently. `parameters` are those of the backbone, replicated on
    every rank or DTensors (FSDP2). Parameters of the heads among them are counted once.

    Raises RuntimeError for a head with `FusedSGD`, unless it is `deferred` and `needs_norm`.
    """
    heads = [head] if isinstance(head, ClassHead) else list(head)
    for each in heads:
        update = each.row_update
        if update is not None and not (update.deferred and update.needs_norm):
            raise RuntimeError(
                "FusedSGD cannot clip the gradient of the class rows: use "
                "FusedSGD(deferred=True, needs_norm=True)"
            )
    of_heads = {id(each) for one in heads for each in one.parameters()}
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    grads = [p.grad for p in given if p.grad is not None and id(p) not in of_heads]
    total = torch.stack([one.squared_gradient_norm() for one in heads]).sum()
    sharded: dict[Any, list[Tensor]] = {}
    for grad in grads:
        layout = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        sharded.setdefault(layout, []).append(local(grad))
    for layout, tensors in sharded.items():
        squares = squared_norm(tensors, total.device)
        if layout is not None:
            mesh, placements = layout
            for dim, placement in enumerate(placements):
                if not placement.is_replicate():  # `is_shard` is false for strided shards
                    all_reduce_sum(squares, mesh.get_group(dim))
        total += squares
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)
    if grads:
        torch._foreach_mul_([local(grad) for grad in grads], factor)
    for one in heads:
        one.scale_gradients(factor)
    return norm


class HeadIntegration:
    """Connects `head` to a training loop that knows only its backbone and `optimizer`.

    `optimizer` updates the parameters of the backbone and of the head. Before each of its steps,
    the norm of all gradients is clipped to `max_norm` (None: not clipped). After each step, the
    gradients of the head are cleared. If the head is called several times per step, the gradients
    of the calls are added up, so divide each loss by the number of calls. A batch loss couples the
    rows of one call. Along the mesh's `data` axis, the gradient is summed in each call.

    A library saves neither the class rows of all ranks nor their moments. `save` and `load` do, on
    any number of ranks. After the library has loaded the state of `optimizer`, a step without a
    call to `load` raises RuntimeError, unless that state is empty (SGD without momentum).

    Clipping knows one head. If `optimizer` updates several heads, pass no `max_norm`, and call
    `clip_grad_norm_` with all of them.

    Raises ValueError if `optimizer` does not update every parameter of the head.

    >>> integration = HeadIntegration(head, optimizer, max_norm=1.0)
    >>> integration.sum_gradients(wrapped)  # before the first step
    """

    def __init__(
        self, head: ClassHead, optimizer: Optimizer, *, max_norm: float | None = None
    ) -> None:
        self.head, self.optimizer, self.max_norm = head, optimizer, max_norm
        self._model: nn.Module | None = None
        self._lacks_head = False
        updated = {id(parameter) for parameter in self._updated()}
        learned = {id(each) for each in head.parameters() if each.requires_grad}
        if isinstance(head, FactoredHead) or head.row_update is not None or learned - updated:
            raise ValueError(
                "the optimizer does not update every parameter of the head: use a ClassHead "
                "without FusedSGD, and pass head.parameters() to the optimizer"
            )
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda *_: head.zero_grad())

    def sum_gradients(self, model: nn.Module) -> None:
        """Make `model`, the backbone in DDP or FSDP2, sum its gradients over the ranks instead of
        averaging them, because the head returns the loss of the global batch.

        Further calls with the same model have no effect. Raises TypeError for another wrapper.
        """
        if model is self._model:
            return
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, sum_gradients)
        elif any(isinstance(part, FSDPModule) for part in model.modules()):
            sum_sharded_gradients(model)
        elif dist.is_initialized() and dist.get_world_size() > 1:
            raise TypeError(
                f"the gradients of a {type(model).__name__} are not summed over the ranks: wrap "
                "the backbone with DistributedDataParallel or fully_shard"
            )
        self._model = model

    def save(self, folder: str | Path) -> None:
        """Save the head and its moments in `optimizer` to a new folder, as safetensors that any
        number of ranks can load (collective).

        Raises FileExistsError if the folder contains safetensors.
        """
        if any(Path(folder).glob("*.safetensors")):
            raise FileExistsError(f"{folder} already contains a checkpoint: pass a new folder")
        moments = {
            (name, moment): tensor
            for name, parameter in self.head.named_parameters()
            for moment, tensor in self.optimizer.state.get(parameter, {}).items()
            if isinstance(tensor, Tensor)
        }
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save({**self._entries(), **self._entries_of(moments)}, storage_writer=writer)

    def load(self, folder: str | Path) -> None:
        """Load what `save` wrote into the head and `optimizer` (collective).

        Call this after the library has loaded the state of `optimizer`. Raises ValueError if the
        head of the checkpoint has other classes, parameters or dtypes, or if files are missing.
        """
        reader = dcp.HuggingFaceStorageReader(str(folder))
        stored = reader.read_metadata().state_dict_metadata
        found = {}
        for key, entry in stored.items():
            assert isinstance(entry, TensorStorageMetadata)
            found[key] = entry.size, entry.properties.dtype
            if sum(chunk.sizes.numel() for chunk in entry.chunks) < entry.size.numel():
                raise ValueError(f"{folder} has only a part of {key}: copy the files of all ranks")
        of_moments = {key: found.pop(key) for key in stored if key.startswith(_MOMENT)}
        entries, moments = self._entries(), {}
        if found != {key: (tensor.shape, tensor.dtype) for key, tensor in entries.items()}:
            raise ValueError(
                f"{folder} contains a head with other classes, parameters or dtypes: create the "
                "head as it was when it was saved"
            )
        parameters = dict(self.head.named_parameters())
        for key, (size, dtype) in of_moments.items():
            name, moment = key.removeprefix(_MOMENT).rsplit(".", 1)
            shape = parameters[name].shape if size else ()
            moments[name, moment] = parameters[name].new_zeros(shape, dtype=dtype)
        dcp.load({**entries, **self._entries_of(moments)}, storage_reader=reader)
        self.head.draw = int(entries[self._draw_key()])
        state = self.optimizer.state_dict()
        positions = {id(parameter): index for index, parameter in enumerate(self._updated())}
        for name, parameter in parameters.items():
            own = {moment: value for (each, moment), value in moments.items() if each == name}
            state["state"].pop(positions.get(id(parameter)), None)
            if own:
                state["state"][positions[id(parameter)]] = own
        self.optimizer.load_state_dict(state)
        self._lacks_head = False

    def _updated(self) -> Iterator[Tensor]:
        """Yield the parameters of the optimizer in the order of its state dict."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _entries(self) -> dict[str, Tensor]:
        """Return the tensors of the head, which share its memory, and its `draw`."""
        entries = {name: self.head.sharded(each) for name, each in self.head.state_dict().items()}
        return {**entries, self._draw_key(): torch.tensor(self.head.draw)}

    def _draw_key(self) -> str:
        # The rows of another tree may have the same shapes, but never the same names.
        return f"draw.{self.head.tree_digest()[:16]}"

    def _entries_of(self, moments: dict[tuple[str, str], Tensor]) -> dict[str, Tensor]:
        return {
            f"{_MOMENT}{name}.{moment}": self.head.sharded(tensor)
            for (name, moment), tensor in moments.items()
        }

    def _before_load(self, _: Optimizer, state: dict[str, Any]) -> None:
        # Accelerate reloads the empty state of a new optimizer.
        self._lacks_head = bool(state["state"])

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._lacks_head:
            raise RuntimeError(
                "the state of the optimizer was loaded, but not that of the head: call "
                "HeadIntegration.load"
            )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._clip()
            return None

        def clipped() -> Any:
            loss = closure()  # Lightning computes the gradients here
            self._clip()
            return loss

        return args[:1], {**kwargs, "closure": clipped}

    def _clip(self) -> None:
        if self.max_norm is not None:
            # torch's fused optimizers divide gradients by the loss scale only in `step`.
            scale = getattr(self.optimizer, "grad_scale", None)
            max_norm = self.max_norm if scale is None else self.max_norm * scale
            clip_grad_norm_(self._updated(), self.head, max_norm)
