"""A head trained with Accelerate.

    torchrun --nproc-per-node 2 examples/head_with_accelerate.py STEPS [CHECKPOINT]

It accumulates two batches per step, clips, and saves the class rows of all ranks. It uses GPUs if
there are any.
"""

import sys

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

from heads import ClassHead, CrossEntropy, HeadIntegration

steps, *checkpoint = sys.argv[1:]
accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
device, size = accelerator.device, accelerator.num_processes
mesh = init_device_mesh(device.type, (1, size), mesh_dim_names=("data", "class"))
torch.manual_seed(0)
backbone = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU())
head = ClassHead(64, 1000, CrossEntropy(), mesh=mesh, device=device)
data = TensorDataset(torch.randn(64, 20), torch.randint(1000, (64,)))
loader = DataLoader(data, batch_size=16, shuffle=True)

backbone, loader = accelerator.prepare(backbone, loader)  # without the head
optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
integration = HeadIntegration(head, optimizer, max_norm=0.1)
integration.sum_gradients(backbone)
optimizer = accelerator.prepare(optimizer)
for folder in checkpoint:
    accelerator.load_state(folder)
    integration.load(f"{folder}/head")
for _ in range(2 if checkpoint else 0, int(steps)):
    for inputs, labels in loader:
        with accelerator.accumulate(backbone):
            loss = head(backbone(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
folder = f"runs/head-with-accelerate-{steps}"
accelerator.save_state(folder)
integration.save(f"{folder}/head")
accelerator.print(f"weights: {sum(p.double().norm() for p in backbone.parameters()):.6f}")
accelerator.end_training()
