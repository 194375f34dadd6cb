"""A DeepSpeed without a private name that kway uses is reported.

`test_strategies.py` uses all of these names. If it fails with this error, check whether the new
version of DeepSpeed has a public function. Otherwise, adapt
`trainer/strategies/private_deepspeed.py` and the version cap in `pyproject.toml`.
"""

from collections.abc import Callable

import deepspeed
import pytest
import torch

from trainer.strategies import private_deepspeed as private


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        (lambda: private.disable_shared_memory_collectives(deepspeed.utils), "ops"),
        (lambda: private.reduced_gradients(object()), "averaged_gradients"),
        (lambda: private.flat_pieces(object(), 1), "single_partition_of_fp32_groups"),
        (lambda: private.flat_pieces(object(), 3), "fp32_partitioned_groups_flat"),
        (lambda: private.weight_piece(torch.nn.Parameter()), "ds_tensor"),
        (lambda: private.release_gathered_weights(object()), "_partition_all_parameters"),
        (lambda: private.link_moments(torch.nn.Parameter(), {}, {}), "_hp_mapping"),
    ],
)
def test_the_error_for_an_unsupported_deepspeed_contains_its_version(
    call: Callable[[], object], missing: str
) -> None:
    message = rf"DeepSpeed {deepspeed.__version__} .* has no {missing}\): install the version in"
    with pytest.raises(RuntimeError, match=message):
        call()
