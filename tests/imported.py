# ruff: noqa: F401
"""What ranks of tests import, imported once: `tests/ranks.py` forks them from a server with this.

Otherwise each rank imports it for itself, which takes it seconds.
"""

import gc
import os

import pytest
import torch
import torch._inductor.compile_fx
import torch.distributed.tensor
import transformers.models.resnet.modeling_resnet

import heads.head
import tests.shards
import trainer.bundle.export
import trainer.train

# DeepSpeed looks for its accelerator while it is imported, which no fork may outlive.
if torch.cuda.device_count() == 0:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.module_inject.auto_ep_layer
    import deepspeed.runtime.zero.muon.muon_optimizer

# A rank that collects garbage then neither walks through these half a million objects nor copies
# the pages of memory that it shares with the server.
gc.collect()
gc.freeze()
