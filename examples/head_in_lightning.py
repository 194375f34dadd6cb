"""A head trained with Lightning, which wraps the whole `LightningModule` with DDP.

    torchrun --nproc-per-node 2 examples/head_in_lightning.py STEPS [CHECKPOINT]

It accumulates two batches per step, clips, and saves the class rows of all ranks. It uses GPUs if
there are any.
"""

import sys

import lightning
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

from heads import ClassHead, CrossEntropy, HeadIntegration


class Classifier(lightning.LightningModule):
    saved_head = None

    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU())

    def setup(self, stage):
        shape = (1, self.trainer.world_size)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("data", "class"))
        head = ClassHead(64, 1000, CrossEntropy(), mesh=mesh, device=self.device)
        self.unwrapped = (head,)  # DDP would wrap a submodule

    def configure_optimizers(self):
        parameters = [*self.backbone.parameters(), *self.unwrapped[0].parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        self.integration = HeadIntegration(self.unwrapped[0], optimizer, max_norm=0.1)
        return optimizer

    def on_save_checkpoint(self, checkpoint):
        checkpoint["head"] = f"runs/head-in-lightning-{self.global_step}/head"
        self.integration.save(checkpoint["head"])

    def on_load_checkpoint(self, checkpoint):
        self.saved_head = checkpoint["head"]

    def on_train_start(self):
        self.integration.sum_gradients(self.trainer.strategy.model)
        if self.saved_head is not None:
            self.integration.load(self.saved_head)

    def training_step(self, batch, _):
        inputs, labels = batch
        return self.unwrapped[0](self.backbone(inputs), labels)


def main(steps, checkpoint=None):
    lightning.seed_everything(0, verbose=False)
    model = Classifier()
    data = TensorDataset(torch.randn(64, 20), torch.randint(1000, (64,)))
    trainer = lightning.Trainer(
        strategy="ddp",
        devices="auto" if torch.cuda.is_available() else 2,
        accumulate_grad_batches=2,
        max_epochs=int(steps),  # an epoch is one step
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=16, shuffle=True), ckpt_path=checkpoint)
    trainer.save_checkpoint(f"runs/head-in-lightning-{steps}/backbone.ckpt")
    if trainer.is_global_zero:
        weights = sum(p.double().norm() for p in model.backbone.parameters())
        print(f"weights: {weights:.6f}")


main(*sys.argv[1:])
