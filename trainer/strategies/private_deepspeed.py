"""All private DeepSpeed names that kway uses, and the reasons for using them. `pyproject.toml` caps
the version.

DeepSpeed 0.19 has no public API to compute a gradient norm over its flat pieces, to read and write
a checkpoint that does not depend on the number of ranks, or to average weights. Each function
raises RuntimeError if the installed DeepSpeed does not have the name that it needs;
`tests/trainer/test_strategies.py` uses all of them.

Stages 1 and 2 use one flat float32 tensor per parameter group, and each rank stores a piece of it.
Stage 3 splits every weight into equal pieces, one per rank.
"""

from typing import Any

from torch import Tensor, nn


def disable_shared_memory_collectives(deepspeed: Any) -> None:
    """Make DeepSpeed use gloo's collectives on CPUs.

    DeepSpeed's own shared-memory collectives are compiled on first use and wait for ranks that have
    exited, without a timeout.
    """
    operators = _required(_required(deepspeed, "ops"), "__compatible_ops__")
    if "deepspeed_shm_comm" not in operators:
        raise _changed("deepspeed.ops.__compatible_ops__ has no deepspeed_shm_comm")
    operators["deepspeed_shm_comm"] = False


def reduced_gradients(zero: Any) -> list[Tensor]:
    """Return this rank's pieces of the reduced gradients (stages 1 to 3)."""
    pieces = _required(zero, "averaged_gradients").values()
    return [piece for group in pieces if group is not None for piece in group]


def flat_pieces(zero: Any, stage: int) -> list[tuple[int, nn.Parameter]]:
    """Return the flat tensors that the optimizer updates on this rank, each with the index of its
    parameter group.
    """
    if stage < 3:
        return list(enumerate(_required(zero, "single_partition_of_fp32_groups")))
    flats = _required(zero, "fp32_partitioned_groups_flat")
    group_of = _required(zero, "sub_group_to_group_id")
    return [(group_of[number], flat) for number, flat in enumerate(flats)]


def weight_piece(parameter: nn.Parameter) -> Tensor:
    """Return this rank's piece of a weight (stage 3). The last piece is padded."""
    piece: Tensor = _required(parameter, "ds_tensor")
    return piece


def release_gathered_weights(zero: Any) -> None:
    """Free full weights that a forward pass gathered and cached, because they become stale when the
    pieces change (stage 3).
    """
    _required(zero, "_partition_all_parameters")()


def set_weight_or_moment(parameter: nn.Parameter, value: Tensor, moment: str | None) -> None:
    """Set a weight or one of its moments from the full tensor (stages 1 and 2, collective)."""
    _required(parameter, "set_full_hp_param")(value, moment)


def link_moments(parameter: nn.Parameter, flats: dict[int, nn.Parameter], state: Any) -> None:
    """Link a weight to its moments (stages 1 and 2). DeepSpeed does this in its first step, but a
    checkpoint is loaded before that. `flats` contains the tensors of `flat_pieces` by group, and
    `state` is the optimizer's state.
    """
    piece = _required(parameter, "_hp_mapping")
    if piece is not None:  # None means that the weight is entirely on another rank
        flat = flats[_required(piece, "param_group_index")]
        _required(piece, "set_optim_state_fragment")(flat, state.get(flat, {}))


def _required(owner: Any, name: str) -> Any:
    """Return an attribute of a DeepSpeed object or module. Raises RuntimeError if it does not
    exist."""
    if not hasattr(owner, name):
        raise _changed(f"{type(owner).__name__} has no {name}")
    return getattr(owner, name)


def _changed(what: str) -> RuntimeError:
    import deepspeed

    return RuntimeError(
        f"DeepSpeed {deepspeed.__version__} is not supported ({what}): install the version in "
        "constraints.txt"
    )
