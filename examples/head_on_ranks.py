"""A class-sharded head in a plain training loop, and its checkpoint for any number of ranks.

    torchrun --nproc-per-node 2 examples/head_on_ranks.py

On GPUs, create the mesh with "cuda" and the process group with "nccl", and pass device="cuda" to
the head.
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

from heads import BatchCrossEntropy, ClassHead, clip_grad_norm_


def main() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "class"))
    torch.manual_seed(0)  # the same initial backbone on every rank
    backbone = torch.nn.Sequential(torch.nn.Linear(784, 64), torch.nn.ReLU())
    head = ClassHead(64, 100_000, BatchCrossEntropy(), mesh=mesh)
    parameters = [*backbone.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)  # different rows on every rank
    for _ in range(3):
        images = torch.rand(32, 784, generator=generator)
        labels = torch.randint(100_000, (32,), generator=generator)
        optimizer.zero_grad()
        loss = head(backbone(images), labels)  # of the global batch, the same on every rank
        loss.backward()  # complete for the head, a partial sum for the backbone
        for parameter in backbone.parameters():
            dist.all_reduce(parameter.grad)  # sum, not mean
        clip_grad_norm_(backbone.parameters(), head, max_norm=1.0)
        optimizer.step()
    print(f"rank {rank}: loss {loss.item():.4f}, holds {len(head.weight)} rows of 100000")
    state = {}
    for name, parameter in head.named_parameters():
        momentum = optimizer.state[parameter]["momentum_buffer"]
        state |= {
            name: head.sharded(parameter.detach()),
            f"{name}.momentum": head.sharded(momentum),
        }
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter("head", save_distributed=True))


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
