"""Loads the checkpoint of `examples/head_on_ranks.py` in one process, and appends two classes.

python examples/append_classes.py
"""

import torch
import torch.distributed.checkpoint as dcp

from heads import BatchCrossEntropy, ClassHead
from heads.append import append_classes

head = ClassHead(64, 100_000, BatchCrossEntropy())
optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
state = {}
for name, parameter in head.named_parameters():
    momentum = optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    state |= {name: head.sharded(parameter.detach()), f"{name}.momentum": head.sharded(momentum)}
dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader("head"))

append_classes(head, [-1, -1], optimizer=optimizer)
print(head.num_classes)  # 100002: the new classes are 100000 and 100001
