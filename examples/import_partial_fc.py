"""Writes a bundle of a classifier that InsightFace trained with Partial FC.

python examples/import_partial_fc.py

Run it in the folder with the files `softmax_fc_gpu_RANK.pt` and `backbone.pt`. Replace
`my_faces:IResNet100` by your class, and the names and the scale by yours. The margin is omitted,
because it applies only in training.
"""

from pathlib import Path

import torch

from data.classes.class_list import ClassInfo
from data.images.config import ImageConfig
from heads.logit_maps import Cosine
from trainer.backbone.backbone import build_backbone
from trainer.backbone.config import ImportedBackbone
from trainer.bundle.spec import BundleSpec, LossSpec
from trainer.bundle.writing import backbone_spec, write_bundle

files = sorted(Path().glob("softmax_fc_gpu_*.pt"), key=lambda file: int(file.stem[15:]))
rows = [torch.load(file, weights_only=True, mmap=True)["weight"] for file in files]
num_classes = sum(map(len, rows))
image = ImageConfig(size=112, mean=[0.5] * 3, std=[0.5] * 3)
config = ImportedBackbone(kind="my_faces:IResNet100")
backbone = build_backbone(config, image=image)
backbone.encoder.load_state_dict(torch.load("backbone.pt", weights_only=True))
write_bundle(
    Path("bundle"),
    backbone=backbone.eval(),
    spec=BundleSpec(
        backbone=backbone_spec(config),
        image=image,
        num_classes=num_classes,
        loss=LossSpec(kind="ce", aligned=False),
        logits=Cosine(scale=64),
        bias=False,
        dim=backbone.dim,
    ),
    classes=(ClassInfo(name=f"person {number}") for number in range(num_classes)),
    thresholds=None,
    weight_blocks=rows,
    model_card="# Faces\n",
)
