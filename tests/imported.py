# ruff: noqa: E402, F401
"""Modules that the fork server preloads before `tests/ranks.py` forks ranks from it.

Otherwise, each rank would spend seconds on these imports.
"""

import gc
import os

gc.disable()  # collections would take a fifth of the time of the imports

import pytest
import torch
import torch._inductor.compile_fx
import torch.distributed.tensor
import transformers.models.resnet.modeling_resnet

import heads.head
import tests.shards
import trainer.backbone.transformers_encoder
import trainer.bundle.export
import trainer.train

# DeepSpeed detects its accelerator on import, and an initialized CUDA context does not survive a
# fork.
if torch.cuda.device_count() == 0:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import distutils.ccompiler  # DeepSpeed imports it from setuptools when it starts

    import deepspeed.module_inject.auto_ep_layer
    import deepspeed.runtime.zero.muon.muon_optimizer

# Exclude the half million objects created so far from garbage collection in the ranks. Otherwise, a
# collection would visit them and copy the memory pages that the ranks share with the server.
gc.collect()
gc.freeze()
gc.enable()
