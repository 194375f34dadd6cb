"""The small published networks: sizes, layers, training, export and planning."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from data.images.config import ImageConfig
from tests.ranks import rank_world, run_on_ranks
from tests.shards import glyph_recipe
from tests.trainer.training import full_entries, started, take_steps
from trainer.backbone.backbone import Backbone, build_backbone
from trainer.backbone.batch_norm import FrozenBatchNorm, GroupBatchNorm, apply_batch_norm_mode
from trainer.backbone.blocks import repeated_blocks
from trainer.backbone.config import BackboneConfig
from trainer.backbone.networks import NETWORKS
from trainer.backbone.networks.cifar_densenet import DenseLayer
from trainer.backbone.networks.cifar_resnet import BasicBlock
from trainer.backbone.networks.wide_resnet import PreActivationBlock
from trainer.backbone.onnx_backbone import OnnxBackbone, write_onnx
from trainer.backbone.trace import trace_backbone
from trainer.bundle.bundle import Bundle
from trainer.bundle.export import export_run
from trainer.bundle.spec import BundleSpec, ClassEntry, LossSpec
from trainer.bundle.writing import write_bundle
from trainer.run.trained_run import open_trained
from trainer.train import train

IMAGE = ImageConfig(size=16, channels=1, mean=(0.5,), std=(0.25,))
# For gray images of 16 x 16 pixels.
SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"hidden_sizes": [24, 16], "image_size": 16},
    "slc_cnn": {"conv_channels": [4, 5, 6, 7, 8, 9], "hidden_size": 16, "image_size": 16},
    "cifar_resnet": {"depth": 8, "hidden_sizes": [4, 6, 8]},
    "wide_resnet": {"depth": 10, "width": 2, "dropout": 0.3},
    "cifar_densenet": {
        "depth": 10,
        "growth_rate": 4,
        "bottleneck": True,
        "compression": 0.5,
        "dropout": 0.1,
    },
}
BC = {"bottleneck": True, "compression": 0.5}
EVERY = pytest.mark.parametrize("model_type", SMALL)


def small(model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, "num_channels": 1, **SMALL[model_type]}


def build(config: dict[str, Any], image: ImageConfig = IMAGE, *, seed: int = 0) -> Backbone:
    torch.manual_seed(seed)
    return build_backbone(BackboneConfig(config=config), image=image)


def published(model_type: str, **fields: Any) -> Backbone:
    """Return a network on the meta device, for the image size used in its paper."""
    is_mnist = model_type == "mlp"
    image = IMAGE.model_copy(update={"size": 28}) if is_mnist else ImageConfig(size=32)
    with torch.device("meta"):
        return build({"model_type": model_type, **fields}, image)


def num_weights(backbone: nn.Module) -> int:
    return sum(parameter.numel() for parameter in backbone.parameters())


def noise(rows: int, size: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shape = (rows, 1, size, size)
    return {"pixel_values": torch.randint(256, shape, generator=generator, dtype=torch.uint8)}


def features(backbone: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return backbone(inputs)


def test_every_network_is_registered_without_shadowing_a_transformers_model():
    assert list(SMALL) == list(NETWORKS)
    assert not NETWORKS.keys() & set(CONFIG_MAPPING_NAMES)


@pytest.mark.parametrize(
    ("model_type", "fields", "num_classes", "millions"),
    [
        ("cifar_resnet", {"depth": 20}, 10, "0.27"),  # He et al. (2016), table 6
        ("cifar_resnet", {"depth": 32}, 10, "0.46"),
        ("cifar_resnet", {"depth": 44}, 10, "0.66"),
        ("cifar_resnet", {"depth": 56}, 10, "0.85"),
        ("cifar_resnet", {"depth": 110}, 10, "1.7"),
        ("wide_resnet", {}, 100, "36.5"),  # Zagoruyko and Komodakis (2016), tables 4 and 5
        ("wide_resnet", {"depth": 40, "width": 1}, 10, "0.6"),
        ("wide_resnet", {"depth": 16, "width": 8}, 10, "11.0"),
        ("cifar_densenet", {}, 10, "1.0"),  # Huang et al. (2017), table 2
        ("cifar_densenet", {"depth": 100, "growth_rate": 24}, 10, "27.2"),
        ("cifar_densenet", {"depth": 100, "growth_rate": 12, **BC}, 10, "0.8"),
        ("cifar_densenet", {"depth": 190, "growth_rate": 40, **BC}, 10, "25.6"),
    ],
)
def test_a_network_has_as_many_weights_as_its_paper_reports(
    model_type, fields, num_classes, millions
):
    """The number covers all trained parameters: convolutions, the scales and shifts of batch norm,
    and the classifier with its biases.
    """
    backbone = published(model_type, **fields)
    count = num_weights(backbone) + num_classes * (backbone.dim + 1)
    assert f"{count / 1e6:.{len(millions.partition('.')[2])}f}" == millions


def test_the_networks_for_single_logit_classification_have_the_layers_given_in_the_paper():
    mlp, cnn = published("mlp"), published("slc_cnn")
    assert num_weights(mlp) == 28 * 28 * 500 + 500 * 500 + 2 * (500 + 500)
    convolutions = [part for part in cnn.modules() if isinstance(part, nn.Conv2d)]
    assert [(part.out_channels, *part.kernel_size) for part in convolutions] == [
        (128, 5, 5),
        (128, 1, 1),
        (256, 5, 5),
        (256, 1, 1),
        (512, 5, 5),
        (512, 1, 1),
    ]
    dense = [part for part in cnn.modules() if isinstance(part, nn.Linear)]
    assert [(part.in_features, part.out_features) for part in dense] == [(512 * 4 * 4, 1024)]
    for network in (mlp, cnn):
        weighted = (nn.Conv2d, nn.Linear)
        order = [p for p in network.modules() if isinstance(p, (*weighted, nn.BatchNorm2d))]
        assert [isinstance(part, weighted) for part in order] == [True, False] * (len(order) // 2)


@EVERY
def test_features_are_the_mean_of_a_feature_map_with_hidden_size_channels(model_type):
    backbone = build(small(model_type)).eval()
    inputs = noise(3)
    assert backbone.dim == backbone.settings.hidden_size
    normalized = (inputs["pixel_values"] / 255 - 0.5) / 0.25
    with torch.no_grad():
        hidden = backbone.encoder(pixel_values=normalized).last_hidden_state
    side = 1 if model_type in ("mlp", "slc_cnn") else 4
    assert hidden.shape == (3, backbone.dim, side, side)
    found = features(backbone, inputs)
    torch.testing.assert_close(found, hidden.mean((2, 3)))
    torch.testing.assert_close(
        features(backbone, {"pixel_values": inputs["pixel_values"][:1]}), found[:1]
    )
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("model_type", ["cifar_resnet", "wide_resnet", "cifar_densenet"])
@pytest.mark.parametrize("size", [4, 17, 24])
def test_a_network_without_weights_per_pixel_accepts_images_of_any_size(model_type, size):
    backbone = build(small(model_type)).eval()
    assert features(backbone, noise(2, size)).shape == (2, backbone.dim)


@EVERY
def test_every_weight_gets_a_gradient(model_type):
    backbone = build(small(model_type)).train()
    found = backbone(noise(5))
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(0))
    (found * weights).sum().backward()
    for name, parameter in backbone.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_the_shortcut_of_a_residual_network_has_no_weights_and_pads_with_zeros():
    block = BasicBlock(3, 5, stride=2)
    nn.init.zeros_(block.norm2.weight)
    x = torch.randn(2, 3, 7, 8)
    found = block(x)
    assert found.shape == (2, 5, 4, 4)
    assert torch.equal(found[:, :3], x[:, :, ::2, ::2].relu())
    assert (found[:, 3:] == 0).all()


@pytest.mark.parametrize(("outputs", "stride"), [(3, 1), (6, 2)])
def test_a_wide_residual_block_activates_before_each_convolution(outputs, stride):
    block = PreActivationBlock(3, outputs, stride=stride, dropout=0.0).eval()
    nn.init.uniform_(block.norm1.running_mean)
    x = torch.randn(2, 3, 8, 8)
    active = block.norm1(x).relu()
    hidden = block.conv2(block.norm2(block.conv1(active)).relu())
    shortcut = x if outputs == 3 else F.conv2d(active, block.shortcut.weight, stride=2)
    torch.testing.assert_close(block(x), hidden + shortcut)


@pytest.mark.parametrize("bottleneck", [False, True])
def test_a_dense_layer_appends_its_maps_to_its_input(bottleneck):
    config = NETWORKS["cifar_densenet"].config_class
    layer = DenseLayer(6, config(growth_rate=4, bottleneck=bottleneck))
    x = torch.randn(2, 6, 5, 5)
    found = layer(x)
    assert found.shape == (2, 10, 5, 5)
    assert torch.equal(found[:, :6], x)
    kernels = [p.kernel_size[0] for p in layer.modules() if isinstance(p, nn.Conv2d)]
    assert kernels == ([1, 3] if bottleneck else [3])


@pytest.mark.parametrize("model_type", ["wide_resnet", "cifar_densenet"])
def test_dropout_is_applied_only_in_training_and_only_if_configured(model_type):
    for dropout, differ in ((0.5, True), (0.0, False)):
        backbone = build({**small(model_type), "dropout": dropout}).train()
        apply_batch_norm_mode(backbone, "frozen", None)
        assert differ != torch.equal(features(backbone, noise(2)), features(backbone, noise(2)))
        backbone.eval()
        assert torch.equal(features(backbone, noise(2)), features(backbone, noise(2)))


@EVERY
def test_random_weights_depend_only_on_the_seed(model_type):
    first, same, other = (build(small(model_type), seed=seed) for seed in (3, 3, 4))
    for name, weight in first.named_parameters():
        assert torch.equal(weight, same.get_parameter(name)), name
        if weight.ndim > 1:
            assert not torch.equal(weight, other.get_parameter(name)), name


def test_initial_weights_have_the_variance_proposed_by_he_et_al():
    cnn = build({"model_type": "slc_cnn", "num_channels": 1, "image_size": 16})
    for part in cnn.modules():
        if isinstance(part, nn.Conv2d):
            fan = part.out_channels * part.kernel_size[0] ** 2
        elif isinstance(part, nn.Linear):
            fan = part.in_features
        else:
            continue
        assert float(part.weight.detach().std()) == pytest.approx((2 / fan) ** 0.5, rel=0.05)
        assert abs(float(part.weight.detach().mean())) < 0.05 * (2 / fan) ** 0.5


@EVERY
def test_the_mode_is_applied_to_every_batch_norm_layer(model_type):
    for mode, kind in (("frozen", FrozenBatchNorm), ("sync", GroupBatchNorm)):
        backbone = build(small(model_type))
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            apply_batch_norm_mode(backbone, mode, dist.group.WORLD)
        finally:
            dist.destroy_process_group()
        norms = [part for part in backbone.modules() if isinstance(part, _BatchNorm)]
        assert norms
        assert {type(part) for part in norms} == {kind}


@EVERY
def test_blocks_contain_nearly_all_weights(model_type):
    """FSDP gathers weights outside the blocks with the root module, and activation checkpointing
    does not cover them.
    """
    backbone = published(model_type)
    blocks = list(repeated_blocks(backbone.encoder))
    assert len(blocks) > 1
    assert sum(num_weights(block) for block in blocks) > 0.98 * num_weights(backbone)


def trained(shards: Path, **changes: Any) -> dict[str, np.ndarray]:
    """Return the entries of an MLP after three clipped steps."""
    task = started(shards, backbone__config=small("mlp"), train__global_batch=11, **changes)
    take_steps(task, 3, rows=11)
    return full_entries(task)


def trained_by_fsdp(shards: Path) -> dict[str, np.ndarray]:
    """Call `trained` with FSDP and activation checkpointing."""
    return trained(shards, train__strategy__kind="fsdp", train__activation_checkpointing=True)


@pytest.mark.slow
def test_an_mlp_trains_the_same_with_fsdp_and_synchronized_batch_norm_as_on_one_rank(glyphs):
    """The 11 rows of a batch are split unevenly over 2 ranks."""
    alone = trained(glyphs)
    for result in run_on_ranks(2, trained_by_fsdp, glyphs):
        assert result.keys() == alone.keys()
        for name, expected in alone.items():
            np.testing.assert_allclose(result[name], expected, rtol=1e-4, atol=2e-5, err_msg=name)


def with_statistics(model_type: str) -> Backbone:
    """Return a network whose batch norm layers have collected the statistics of one batch."""
    backbone = build(small(model_type)).train()
    features(backbone, noise(8))
    return backbone.eval()


@EVERY
def test_a_bundle_computes_the_same_features_as_the_network(model_type, tmp_path):
    backbone = with_statistics(model_type)
    write_bundle(
        tmp_path / "bundle",
        backbone=backbone,
        spec=BundleSpec(
            image=IMAGE,
            num_classes=2,
            loss=LossSpec(kind="bce", aligned=True),
            bias=False,
            dim=backbone.dim,
        ),
        classes=[ClassEntry(name=name) for name in "ab"],
        thresholds=None,
        weight_blocks=[torch.zeros(2, backbone.dim)],
        model_card="",
    )
    with Bundle.open(tmp_path / "bundle") as bundle:
        bundle.verify()
        loaded = bundle.load_backbone()
    assert torch.equal(features(loaded, noise(3)), features(backbone, noise(3)))


# Together these use every operation of the five networks.
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param("slc_cnn", marks=pytest.mark.slow),
        "cifar_resnet",
        pytest.param("cifar_densenet", marks=pytest.mark.slow),
    ],
)
def test_onnxruntime_computes_the_same_features_as_the_network(model_type, tmp_path):
    backbone = with_statistics(model_type)
    write_onnx(backbone, IMAGE, tmp_path / "backbone.onnx")
    session = OnnxBackbone(tmp_path / "backbone.onnx", threads=1)
    for rows in (1, 4):
        expected = features(backbone, noise(rows))
        close = {"rtol": 1e-4, "atol": 1e-4 * float(expected.abs().max())}
        torch.testing.assert_close(session(noise(rows)), expected, **close)


def test_a_folder_with_transformers_weights_can_be_a_pretrained_backbone(tmp_path):
    backbone = build(small("wide_resnet")).eval()
    backbone.encoder.save_pretrained(tmp_path / "weights")
    config = BackboneConfig(name=str(tmp_path / "weights"), weights="pretrained")
    loaded = build_backbone(config, image=IMAGE).eval()
    assert torch.equal(features(loaded, noise(2)), features(backbone, noise(2)))
    assert isinstance(AutoModel.from_pretrained(tmp_path / "weights"), NETWORKS["wide_resnet"])


def test_an_exported_run_computes_the_same_features_as_its_task(images, tmp_path):
    """The run takes four steps on shards of color images, which it reads in grayscale."""
    recipe = glyph_recipe(images, tmp_path / "run", backbone__config=small("wide_resnet"))
    train(recipe, rank_world())
    export_run(recipe.run, tmp_path / "bundle", rank_world())
    task = open_trained(recipe.run, rank_world()).task
    with Bundle.open(tmp_path / "bundle") as bundle:
        loaded = bundle.load_backbone()
    assert torch.equal(features(loaded, noise(4)), features(task.backbone, noise(4)))
    assert int(loaded.encoder.norm.num_batches_tracked) == 4


@EVERY
def test_the_network_is_traced(model_type):
    config = small(model_type)
    recipe = glyph_recipe(Path("unused"), Path("unused"), backbone__config=config)
    network = trace_backbone(recipe, rows=4, ranks=2, cuda=False)
    backbone = build(config)
    norms = [part for part in backbone.modules() if isinstance(part, nn.BatchNorm2d)]
    assert (network.dim, network.numel) == (backbone.dim, num_weights(backbone))
    assert network.norms == tuple(part.num_features for part in norms)
    assert network.flops > 2 * 4 * num_weights(backbone)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "wide_resnett"}, "did you mean wide_resnet"),
        ({"model_type": "wide_resnet", "widht": 2}, "widht is not a known key: did you mean width"),
        ({"model_type": "wide_resnet", "width": 0}, "width is 0, but only positive"),
        ({"model_type": "wide_resnet", "depth": 29}, r"depth is 29,.* use 28 or 34"),
        ({"model_type": "wide_resnet", "depth": "28"}, r"'depth' expected int, got str"),
        ({"model_type": "wide_resnet", "dropout": 1.0}, "dropout is 1.0"),
        ({"model_type": "cifar_resnet", "depth": 21}, r"depth is 21,.* use 20 or 26"),
        ({"model_type": "cifar_resnet", "depth": 2}, r"depth is 2,.* use 8 or 14"),
        ({"model_type": "cifar_resnet", "hidden_sizes": [8, 4, 2]}, r"is \[8, 4, 2\]: set three"),
        ({"model_type": "cifar_resnet", "hidden_sizes": [8, 16]}, r"is \[8, 16\]: set three"),
        ({"model_type": "cifar_resnet", "num_channels": 3}, r"num_channels is 3, but .* is 1"),
        ({"model_type": "cifar_densenet", "depth": 42}, r"depth is 42,.* use 40 or 43"),
        ({"model_type": "cifar_densenet", "depth": 43, **BC}, r"depth is 43,.* use 40 or 46"),
        ({"model_type": "cifar_densenet", "growth_rate": 0}, "growth_rate is 0, but only positive"),
        ({"model_type": "cifar_densenet", "compression": 1.5}, "compression is 1.5:"),
        ({"model_type": "cifar_densenet", "compression": 0}, "compression is 0:"),
        ({"model_type": "slc_cnn", "conv_channels": [4, 4]}, r"is \[4, 4\]: set six numbers"),
        ({"model_type": "slc_cnn", "conv_channels": [4, 4, 4, 0, 4, 4]}, "only positive numbers"),
        ({"model_type": "mlp", "hidden_sizes": []}, r"hidden_sizes is \[\], but only positive"),
        ({"model_type": "mlp", "image_size": 0}, "image_size is 0, but only positive"),
        (
            {"model_type": "mlp"},
            r"image_size is 28, but images have 16 x 16 .* mlp accepts only one size",
        ),
        (
            {"model_type": "slc_cnn"},
            r"image_size is 32, but images have 16 x 16 .* data.image.size",
        ),
    ],
)
def test_errors_for_invalid_fields_contain_the_fix(fields, message):
    with pytest.raises(ValueError, match=message):
        build({"num_channels": 1, **fields})


@pytest.mark.parametrize("model_type", ["mlp", "slc_cnn"])
def test_images_of_another_size_are_rejected_by_fixed_size_networks(model_type):
    """Such sizes can come from `data.augment.progressive`, which is not part of the network's
    configuration.
    """
    with pytest.raises(ValueError, match=r"image_size is 16, but images have 12 x 12 pixels"):
        features(build(small(model_type)).eval(), noise(2, size=12))


def test_images_too_small_for_the_transitions_are_rejected():
    with pytest.raises(ValueError, match=r"3 x 3 pixels, .* set data.image.size to 4 or more"):
        features(build(small("cifar_densenet")).eval(), noise(2, size=3))


def test_a_fully_connected_network_accepts_a_single_row_only_with_frozen_statistics():
    backbone = build(small("mlp")).train()
    with pytest.raises(ValueError, match=r"one row at a time: raise train.global_batch, lower"):
        backbone(noise(1))
    apply_batch_norm_mode(backbone, "frozen", None)
    assert backbone(noise(1)).shape == (1, 16)
