"""A head trained by transformers' `Trainer`, which wraps the backbone with DDP.

    torchrun --nproc-per-node 2 examples/head_in_trainer.py STEPS [CHECKPOINT]

It accumulates two batches per step, clips, and saves the class rows of all ranks. It uses GPUs if
there are any.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from heads import ClassHead, CrossEntropy, HeadIntegration


class HeadTrainer(Trainer):
    """Trains a feature extractor and a head on top of it."""

    def __init__(self, *args, head, **kwargs):
        super().__init__(*args, **kwargs)
        self.head = head
        self.add_callback(HeadCheckpoints(self))

    def create_optimizer(self, model=None):
        parameters = [*self.model.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=self.args.learning_rate, momentum=0.9)
        self.integration = HeadIntegration(self.head, self.optimizer, max_norm=0.1)
        return self.optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if model.training:
            self.integration.sum_gradients(model)  # `model` is the DDP wrapper
        self.head.train(model.training)
        features = model(inputs["inputs"])
        loss = self.head(features, inputs["labels"])
        return (loss, features) if return_outputs else loss


class HeadCheckpoints(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_save(self, args, state, control, **_):
        self.trainer.integration.save(f"{args.output_dir}/checkpoint-{state.global_step}/head")

    def on_train_begin(self, args, state, control, **_):
        if state.global_step:  # resumed
            self.trainer.integration.load(f"{args.output_dir}/checkpoint-{state.global_step}/head")


def collate(rows):
    inputs, labels = zip(*rows, strict=True)
    return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}


def main(steps, checkpoint=None):
    arguments = TrainingArguments(
        output_dir="runs/head-in-trainer",
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        max_steps=int(steps),
        save_steps=int(steps),
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        report_to="none",
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    device, size = arguments.device.type, dist.get_world_size()
    mesh = init_device_mesh(device, (1, size), mesh_dim_names=("data", "class"))
    torch.manual_seed(0)
    backbone = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU())
    head = ClassHead(64, 1000, CrossEntropy(), mesh=mesh, device=arguments.device)
    data = TensorDataset(torch.randn(64, 20), torch.randint(1000, (64,)))
    trainer = HeadTrainer(backbone, arguments, collate, data, head=head)
    trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.is_world_process_zero():
        print(f"weights: {sum(p.double().norm() for p in backbone.parameters()):.6f}")


main(*sys.argv[1:])
