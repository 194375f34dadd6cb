"""Recipes: loading, merging and error messages."""

from pathlib import Path

import pytest

from trainer.config import Duration
from trainer.recipe import dump_recipe, load_recipe

SHIPPED = sorted(Path("launch/recipes").glob("*.yaml"))
MINIMAL = """
run: runs/x
data: {shards: shards/x}
backbone: {config: {model_type: resnet}}
"""


def recipe_file(tmp_path: Path, text: str = MINIMAL) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_recipe_loads_and_round_trips(path, tmp_path):
    recipe = load_recipe(path)
    assert load_recipe(recipe_file(tmp_path, dump_recipe(recipe))) == recipe


def test_overrides_apply_in_order_and_scientific_notation_is_a_number(tmp_path):
    recipe = load_recipe(
        recipe_file(tmp_path),
        ["optimizer.lr=1", "optimizer.lr=1e-8", "train.duration={steps: 3}", "seed=7"],
    )
    assert recipe.optimizer.lr == 1e-8
    assert recipe.train.duration == Duration(steps=3)
    assert recipe.seed == 7


def test_a_mapping_with_a_new_kind_is_replaced_and_others_are_merged(tmp_path):
    text = MINIMAL + "optimizer: {kind: sgd, momentum: 0.5, lr: 0.3}\n"
    path = recipe_file(tmp_path, text)
    assert load_recipe(path, ["optimizer.kind=adamw"]).optimizer.lr == 1e-3
    assert load_recipe(path, ["optimizer={kind: adamw, lr: 0.2}"]).optimizer.lr == 0.2
    merged = load_recipe(path, ["optimizer={kind: sgd, lr: 0.2}"]).optimizer
    assert (merged.lr, merged.momentum) == (0.2, 0.5)


NAMED = "backbone: {name: someone/model, weights: pretrained, pooling: mean, config: null}"
CONFIGURED = "backbone: {kind: transformers, name: null, config: {model_type: bert}, pooling: mean}"


@pytest.mark.parametrize(
    ("stored", "overrides", "expected"),
    [
        (NAMED, ["backbone={config: {model_type: resnet}}"], (None, "random", "auto")),
        (
            NAMED,
            ["backbone.weights=random", "backbone.config.model_type=resnet"],
            (None, "random", "mean"),
        ),
        (NAMED, ["backbone={name: other}"], ("other", "pretrained", "mean")),
        (CONFIGURED, ["backbone={name: other}"], ("other", "random", "auto")),
        (CONFIGURED, ["backbone.name=other"], ("other", "random", "mean")),
        # The order of the overrides does not matter here.
        (
            CONFIGURED,
            ["backbone.weights=pretrained", "backbone.name=other"],
            ("other", "pretrained", "mean"),
        ),
    ],
)
def test_a_backbone_that_is_specified_by_another_key_is_replaced(
    stored, overrides, expected, tmp_path
):
    path = recipe_file(
        tmp_path, MINIMAL.replace("backbone: {config: {model_type: resnet}}", stored)
    )
    backbone = load_recipe(path, overrides).backbone
    assert (backbone.name, backbone.weights, backbone.pooling) == expected
    assert (backbone.config is None) == (backbone.name is not None)


def test_a_new_model_type_drops_the_settings_of_the_old_one():
    """The ResNet-50 override in launch/recipes/images.yaml depends on this."""
    path = Path("launch/recipes/images.yaml")
    for override in ("backbone.config={model_type: resnet}", "backbone.config.model_type=vit"):
        config = load_recipe(path, [override]).backbone.config
        assert config.keys() == {"model_type"}
    one_field = load_recipe(path, ["backbone.config.depths=[1, 1, 1, 1]"]).backbone.config
    assert one_field["hidden_sizes"] == [64, 128, 256, 512]


def test_yaml_merge_keys_and_duration_units_are_merged(tmp_path):
    path = recipe_file(tmp_path, MINIMAL + "optimizer: {<<: {lr: 0.3}, momentum: 0.5}\n")
    assert load_recipe(path).optimizer.lr == 0.3
    path = recipe_file(tmp_path, MINIMAL + "train: {duration: {epochs: 2}}\n")
    assert load_recipe(path, ["train.duration={steps: 3}"]).train.duration == Duration(steps=3)


def test_a_mapping_without_a_kind_gets_the_default_kind(tmp_path):
    path = recipe_file(tmp_path, MINIMAL + "optimizer: {lr: 0.3}\nhead: {weights: {}}\n")
    recipe = load_recipe(path)
    assert (recipe.optimizer.kind, recipe.optimizer.lr) == ("sgd", 0.3)
    assert recipe.head.weights.kind == "dense"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "optimizer.momentun=1",
            r"optimizer\.momentun is not a known key: did you mean momentum\?",
        ),
        ("trian.global_batch=1", r"trian is not a known key: did you mean train\?"),
        (
            "head.loss.kind=batch_cee",
            r"head\.loss\.kind is 'batch_cee': did you mean batch_ce\? choose one of ce, batch_ce",
        ),
        ("optimizer.lr=-1", r"optimizer\.lr: .*greater than 0, got -1"),
        ("train.duration={steps: 1, epochs: 1}", r"exactly one of steps, epochs, samples"),
        ("evaluation.recalls=[1.5]", r"evaluation\.recalls\.0: .*less than or equal to 1"),
        ("checkpoint.every.steps=0", r"an interval must be longer than 0"),
        ("seed", r"override 'seed' is not of the form key=value"),
        ("seed=[", r"override 'seed=\[' is not valid YAML"),
        (
            "train.micro_batches=999",
            r"train\.micro_batches is 999, but it must be at most train\.global_batch",
        ),
    ],
)
def test_an_invalid_override_raises_a_one_line_error_with_the_key_and_the_fix(
    override, message, tmp_path
):
    with pytest.raises(ValueError, match=message) as caught:
        load_recipe(recipe_file(tmp_path), [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["head.loss.kind=batch_ce", "train.global_batch=1"],
            r"train\.global_batch is 1, but head\.loss batch_ce .*global_batch to 2 or more",
        ),
        (
            ["head={weights: {kind: factored}, loss: {kind: ce}, bias: false}"],
            r"head: factored weights do not support ce: set weights\.kind=dense, or set loss\.kind",
        ),
        (
            [
                "head={weights: {kind: factored}, loss: {kind: quadratic}, bias: false}",
                "optimizer.kind=adamw",
            ],
            r"head\.weights\.kind=factored requires plain SGD: set optimizer\.kind=sgd",
        ),
    ],
)
def test_conflicting_keys_raise_a_one_line_error(overrides, message, tmp_path):
    path = recipe_file(tmp_path)
    with pytest.raises(ValueError, match=rf"^recipe {path}: {message}") as caught:
        load_recipe(path, overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2\n", "line 1: duplicate key seed"),
        ("- a\n", "is not a mapping"),
        ("a: [", r"is not valid YAML \(line \d"),
        ("seed: 1\n", "run is missing; data is missing; backbone is missing"),
    ],
)
def test_an_invalid_file_is_reported(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe_file(tmp_path, text))


@pytest.mark.parametrize(
    ("duration", "steps"),
    [({"steps": 7}, 7), ({"epochs": 1}, 11), ({"epochs": 0.5}, 6), ({"samples": 21}, 3)],
)
def test_a_duration_is_rounded_up_to_full_steps(duration, steps):
    assert Duration(**duration).in_steps(num_samples=101, global_batch=10) == steps
