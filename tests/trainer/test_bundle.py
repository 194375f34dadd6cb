"""The bundle: what is written is what is read, and damage is named."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from tests.tiny_bundle import (
    DIM,
    MAX_LENGTH,
    NAMES,
    rows,
    spec,
    tiny_backbone,
    tiny_text_backbone,
    tiny_tokenizer,
    write,
    write_of_texts,
)
from trainer.bundle import Bundle, logits_of
from trainer.bundle_spec import BundleSpec
from trainer.class_names import ClassNames


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bundles") / "pets")


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "pets"))


@pytest.mark.parametrize("bias", [True, False])
def test_rows_come_back_exactly_and_logits_equal_a_linear_layer(tmp_path: Path, bias: bool) -> None:
    weight = rows(bias=bias)
    wanted = [6, 0, 3, 3]
    features = torch.randn(5, DIM)
    with Bundle.open(write(tmp_path / "b", bias=bias)) as bundle:
        assert torch.equal(bundle.rows(wanted), weight[wanted])
        logits = logits_of(features, bundle.rows(wanted))
    layer = torch.nn.Linear(DIM, len(NAMES), bias=bias)
    with torch.no_grad():
        layer.weight.copy_(weight[:, :DIM])
        if bias:
            layer.bias.copy_(weight[:, DIM])
        torch.testing.assert_close(logits, layer(features)[:, wanted])


def test_any_safetensors_reader_opens_the_class_weights(written: Path) -> None:
    assert torch.equal(load_file(written / "class_weights.safetensors")["weight"], rows())


def test_the_backbone_comes_back_in_evaluation_mode_with_the_same_features(written: Path) -> None:
    inputs = {"pixel_values": torch.randint(0, 256, (3, 1, 16, 16), dtype=torch.uint8)}
    before = torch.get_rng_state()
    loaded = Bundle.open(written).load_backbone()
    assert torch.equal(torch.get_rng_state(), before)
    assert not loaded.training
    with torch.no_grad():
        assert torch.equal(loaded(inputs), tiny_backbone()(inputs))


def test_every_file_is_readable_by_others_and_none_is_a_pickle(written: Path) -> None:
    files = sorted(file for file in written.rglob("*") if file.is_file())
    assert [file.relative_to(written).as_posix() for file in files] == [
        "MODEL_CARD.md",
        "backbone.safetensors",
        "bundle.json",
        "class_weights.safetensors",
        "encoder/config.json",
    ]
    assert all(file.stat().st_mode & 0o777 == 0o644 for file in files)
    assert all(folder.stat().st_mode & 0o005 for folder in (written, written / "encoder"))


def test_a_model_of_texts_comes_back_with_its_tokenizer_and_the_length_it_cuts_at(
    tmp_path: Path,
) -> None:
    path = write_of_texts(tmp_path / "b")
    text = "cat dog 猫 und " * 9
    ids = tiny_tokenizer().encode([text])
    with Bundle.open(path) as bundle:
        bundle.verify()
        assert bundle.spec.reads == "texts"
        assert bundle.load_tokenizer().encode([text]) == ids
        inputs = {
            "input_ids": torch.tensor(ids),
            "attention_mask": torch.ones(1, MAX_LENGTH).long(),
        }
        with torch.no_grad():
            assert torch.equal(bundle.load_backbone()(inputs), tiny_text_backbone()(inputs))
    theirs = AutoTokenizer.from_pretrained(path / "tokenizer")(text, truncation=True)
    assert [theirs["input_ids"]] == ids


def test_a_changed_or_missing_tokenizer_is_found(tmp_path: Path) -> None:
    path = write_of_texts(tmp_path / "b")
    file = path / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text().replace('"lowercase":false', '"lowercase": true'))
    with pytest.raises(ValueError, match=r"tokenizer\.json does not match its checksum"):
        Bundle.open(path).verify()
    files = json.loads((path / "bundle.json").read_text())["files"]
    del files["tokenizer/tokenizer.json"]
    edit(path, files=files)
    with pytest.raises(ValueError, match=r"files does not name tokenizer/tokenizer\.json"):
        Bundle.open(path)


@pytest.mark.parametrize("changes", [{"image": None}, {"text": {"max_length": 9}}])
def test_a_model_reads_exactly_one_of_pictures_and_texts(changes: dict) -> None:
    with pytest.raises(ValueError, match="give exactly one of image, text"):
        BundleSpec.model_validate({**spec().model_dump(), **changes})


def test_the_specification_comes_back_whole(written: Path) -> None:
    assert Bundle.open(written).spec == spec()


def test_a_class_without_positives_gets_the_pooled_threshold_and_says_so(written: Path) -> None:
    bundle = Bundle.open(written)
    assert bundle.threshold(2, 0.9) == (2.0, "class")
    assert bundle.threshold(6, 0.9) == (0.5, "pooled")
    assert bundle.threshold(6, 0.99) == (None, None)
    with pytest.raises(ValueError, match=r"no thresholds for recall 0.5; .*holds: 0.9, 0.99"):
        bundle.threshold(0, 0.5)


def test_classes_are_found_by_exact_name_first_then_by_id(written: Path) -> None:
    bundle = Bundle.open(written)
    assert [bundle.class_id(wanted) for wanted in ("husky", 4, "#4", "#3", "7")] == [0, 4, 4, 5, 6]
    for outside in (7, -1, "#7", "#" + "9" * 5000):
        with pytest.raises(ValueError, match=r"not within 0 … 6"):
            bundle.class_id(outside)


def test_an_unknown_class_is_refused_with_the_nearest_names(written: Path) -> None:
    with pytest.raises(ValueError, match=r"no class 'Huskey'; the nearest names are 'husky'"):
        Bundle.open(written).class_id("Huskey")
    with pytest.raises(ValueError, match="no name is like it"):
        Bundle.open(written).class_id("ξψω")


def test_the_nearest_of_a_hundred_thousand_names_is_the_one_with_a_slip() -> None:
    names = ClassNames([f"species {place * 7919 % 1_000_003}" for place in range(100_000)])
    wanted = names.names[54_321]
    slip = wanted.replace("species", "speices")
    assert names.nearest(slip)[0] == wanted


def test_search_puts_names_that_begin_with_the_text_first_and_counts_all() -> None:
    names = ClassNames(["a cat", "Cat", "dog", "catfish", "bobcat"])
    assert names.search("CAT", limit=10) == ([1, 3, 0, 4], 4)
    assert names.search("cat", limit=2, offset=1) == ([3, 0], 4)


# ---------------------------------------------------------------------------- writing


def test_an_existing_path_is_kept_unless_forced(copy: Path) -> None:
    with pytest.raises(ValueError, match="exists already"):
        write(copy)
    Bundle.open(copy).verify()
    (copy / "stray").write_text("from before")
    write(copy, force=True)
    assert not (copy / "stray").exists()
    assert os.listdir(copy.parent) == [copy.name]
    Bundle.open(copy).verify()


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (list(rows()[:5].split(2)), "5 rows came for 7 classes"),
        ([rows(), rows()[:1]], "8 rows came for 7 classes"),
        ([rows(bias=False)], r"\[7, 16\] is no rows of 17"),
        ([rows()[:4], torch.full((3, DIM + 1), torch.nan)], "row 4 holds NaN or infinity"),
    ],
)
def test_a_failed_write_says_why_and_leaves_nothing(
    tmp_path: Path, blocks: list[Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "b", blocks=blocks)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_forced_write_keeps_the_old_bundle(copy: Path) -> None:
    with pytest.raises(ValueError, match="rows came for"):
        write(copy, blocks=[rows()[:1]], force=True)
    Bundle.open(copy).verify()
    assert os.listdir(copy.parent) == [copy.name]


def test_class_names_must_differ() -> None:
    with pytest.raises(ValueError, match="'cat' stands twice"):
        BundleSpec.model_validate({**spec().model_dump(), "classes": [{"name": "cat"}] * 7})


# ---------------------------------------------------------------------------- damage


def edit(path: Path, **changes: object) -> None:
    file = path / "bundle.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_newer_format_asks_for_an_update(copy: Path) -> None:
    edit(copy, format_version=2, from_the_future=True)
    with pytest.raises(ValueError, match=r"bundle of format 2 .* update kway"):
        Bundle.open(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "[" * 100_000, "\xff"])
def test_damaged_json_is_named(copy: Path, text: str) -> None:
    (copy / "bundle.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"bundle\.json is damaged"):
        Bundle.open(copy)


def test_an_unknown_key_is_named(copy: Path) -> None:
    edit(copy, surprise=1)
    with pytest.raises(ValueError, match=r"bundle\.json: surprise: "):
        Bundle.open(copy)


def test_a_file_name_that_leaves_the_bundle_is_refused(copy: Path) -> None:
    files = json.loads((copy / "bundle.json").read_text())["files"]
    edit(copy, files={**files, "../secret": {"bytes": 0, "sha256": "0" * 64}})
    with pytest.raises(ValueError, match="points outside the bundle"):
        Bundle.open(copy)


@pytest.mark.parametrize("name", ["class_weights.safetensors", "backbone.safetensors"])
def test_truncated_weights_are_named(copy: Path, name: str) -> None:
    os.truncate(copy / name, (copy / name).stat().st_size - 4)
    with pytest.raises(ValueError, match=rf"{name} has \d+ bytes instead of"):
        Bundle.open(copy)


def test_missing_files_are_named(copy: Path, tmp_path: Path) -> None:
    (copy / "MODEL_CARD.md").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks MODEL_CARD\.md"):
        Bundle.open(copy)
    with pytest.raises(FileNotFoundError, match="is no bundle"):
        Bundle.open(tmp_path)


def test_a_flipped_bit_is_found_by_verify(copy: Path) -> None:
    file = copy / "class_weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"class_weights\.safetensors does not match"):
        Bundle.open(copy).verify()


@pytest.mark.parametrize("length", [0, 2**63, 60])
def test_a_damaged_header_of_the_weights_is_refused(copy: Path, length: int) -> None:
    file = copy / "class_weights.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(ValueError, match=r"class_weights\.safetensors"):
        Bundle.open(copy)


def test_weights_of_another_shape_are_refused(copy: Path) -> None:
    file = copy / "class_weights.safetensors"
    file.write_bytes(file.read_bytes().replace(b"[7,17]", b"[17,7]"))
    with pytest.raises(ValueError, match=r"should hold 'weight', float32 \[7, 17\]"):
        Bundle.open(copy)


def test_backbone_weights_of_another_network_are_refused_in_one_line(copy: Path) -> None:
    file = copy / "encoder" / "config.json"
    file.write_bytes(file.read_bytes().replace(b'"embedding_size": 8', b'"embedding_size": 4'))
    with pytest.raises(ValueError, match=r"does not fit encoder/config\.json") as caught:
        Bundle.open(copy).load_backbone()
    assert "\n" not in str(caught.value)
