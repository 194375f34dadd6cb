"""Reading a bundle returns exactly the data that was written, and damage is reported."""

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from data import files
from data.classes.class_list import ClassInfo
from heads import ClassHead
from heads.losses import SphericalSoftmax
from serving.galleries.searching import class_scores
from tests.heads.cases import LOGIT_MAPS
from tests.tiny_bundle import (
    DIM,
    MAX_LENGTH,
    NAMES,
    as_format_5,
    rows,
    tiny_backbone,
    tiny_text_backbone,
    tiny_tokenizer,
    write,
    write_of_format_4,
    write_of_texts,
)
from trainer.bundle.bundle import Bundle
from trainer.bundle.spec import LossSpec
from trainer.bundle.writing import rewrite_bundle


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bundles") / "pets")


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "pets"))


@pytest.mark.parametrize("name", LOGIT_MAPS)
def test_served_scores_equal_the_evaluated_scores(tmp_path: Path, name: str) -> None:
    """Tests both a query and a gallery. During training, the head's logit map also has a margin and
    a prior.
    """
    counts = torch.arange(len(NAMES))
    head = ClassHead(
        DIM, len(NAMES), SphericalSoftmax(), logits=LOGIT_MAPS[name], class_counts=counts
    )
    for parameter in head.parameters():
        parameter.data.normal_()
    (block,) = head.class_rows()
    bias = [] if block.bias is None else [block.bias[:, None]]
    loss = LossSpec(kind="x", aligned=False, score="spherical", eps=head.loss.score_eps)
    changes = {"logits": head.evaluated_map().model_dump(), "loss": loss.model_dump()}
    stored = torch.cat([block.rows, *bias], dim=1)
    features = torch.randn(5, DIM)
    (evaluated,) = head.score_blocks(features)
    written = write(tmp_path / "b", bias=bool(bias), blocks=[stored], changes=changes)
    with Bundle.open(written) as bundle:
        assert torch.equal(bundle.scores(features, range(len(NAMES))), evaluated.scores)
        found = class_scores(features.numpy(), bundle.rows([2]), bundle.spec.logits, loss)
    torch.testing.assert_close(torch.from_numpy(found), evaluated.scores[:, 2])


def test_the_backbone_is_loaded_in_evaluation_mode_with_the_same_features(written: Path) -> None:
    inputs = {"pixel_values": torch.randint(0, 256, (3, 1, 16, 16), dtype=torch.uint8)}
    before = torch.get_rng_state()
    loaded = Bundle.open(written).load_backbone()
    assert torch.equal(torch.get_rng_state(), before)
    assert not loaded.training
    with torch.no_grad():
        assert torch.equal(loaded(inputs), tiny_backbone()(inputs))


def test_every_file_is_readable_by_all_users_and_none_is_a_pickle(written: Path) -> None:
    files = sorted(file for file in written.rglob("*") if file.is_file())
    assert [file.relative_to(written).as_posix() for file in files] == [
        "MODEL_CARD.md",
        "backbone.safetensors",
        "bundle.json",
        "class_weights.safetensors",
        "classes.safetensors",
        "encoder/config.json",
        "thresholds.safetensors",
    ]
    assert all(file.stat().st_mode & 0o777 == 0o644 for file in files)
    assert all(folder.stat().st_mode & 0o005 for folder in (written, written / "encoder"))


def test_a_text_model_is_loaded_with_its_tokenizer_and_maximum_length(
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


def test_a_class_without_positives_uses_the_pooled_threshold(written: Path) -> None:
    bundle = Bundle.open(written)
    assert (bundle.positives(2), bundle.positives(6)) == (5, 0)
    own, pooled, nothing = (bundle.threshold(*at) for at in ((2, 0.9), (6, 0.9), (6, 0.99)))
    assert (own.threshold, own.threshold_source) == (2.0, "guaranteed")
    shrunk = bundle.threshold(5, 0.9)
    assert (shrunk.threshold, shrunk.threshold_source) == (5.0, "shrunk")
    assert shrunk.classes_below_recall is None
    assert (pooled.threshold, pooled.threshold_source) == (0.5, "pooled")
    assert pooled.classes_below_recall == 0.25
    assert (nothing.threshold, nothing.threshold_source) == (None, None)
    assert nothing.expected_precision is None
    with pytest.raises(ValueError, match=r"no thresholds for recall 0.5, .*: 0.9, 0.99"):
        bundle.threshold(0, 0.5)


def test_thresholds_in_format_4_promise_nothing(tmp_path: Path) -> None:
    with Bundle.open(write_of_format_4(tmp_path / "b")) as bundle:
        bundle.verify()
        own, pooled = bundle.threshold(2, 0.9), bundle.threshold(6, 0.9)
        assert (own.threshold, own.threshold_source) == (2.0, "empirical")
        assert own.expected_precision == 5 / 8
        assert (pooled.threshold, pooled.threshold_source) == (0.5, "pooled")
        assert (own.pass_rate_interval, pooled.pass_rate_interval) == (None, None)
        assert bundle.threshold(6, 0.99).threshold is None


def test_classes_are_found_by_exact_name_or_id_unless_ambiguous(
    written: Path,
) -> None:
    bundle = Bundle.open(written)
    assert [bundle.classes.id_of(query) for query in ("husky", 4, "#4", 3, "#5", "7")] == [
        *(0, 4, 4),
        *(3, 5, 6),
    ]
    with pytest.raises(
        ValueError, match=r"'#3' is both the name of class 5 and the ID of class '.*': .*'#5'"
    ):
        bundle.classes.id_of("#3")
    for outside in (7, -1, "#7", "#" + "9" * 5000):
        with pytest.raises(ValueError, match=r"out of range 0 … 6"):
            bundle.classes.id_of(outside)


# ---------------------------------------------------------------------------- writing


def test_an_existing_path_is_replaced_only_with_force(copy: Path) -> None:
    with pytest.raises(ValueError, match="already exists"):
        write(copy)
    Bundle.open(copy).verify()
    (copy / "stray").write_text("from before")
    write(copy, force=True)
    assert not (copy / "stray").exists()
    assert os.listdir(copy.parent) == [copy.name]
    Bundle.open(copy).verify()


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_symbolic_link_stays_and_its_target_is_replaced(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(files, "_exchanged", lambda *_: False)
    (tmp_path / "link").symlink_to(copy)
    (copy / "stray").write_text("from before")
    with Bundle.open(copy) as before:
        found = before.thresholds
        rewrite_bundle(tmp_path / "link", tmp_path / "link", thresholds=found, model_card="# new\n")
    assert (tmp_path / "link").is_symlink()
    assert (copy / "MODEL_CARD.md").read_text() == "# new\n"
    assert sorted(os.listdir(tmp_path)) == sorted({copy.name, "link"})
    Bundle.open(tmp_path / "link").verify()


def test_a_bundle_exists_at_all_times_while_it_is_replaced(copy: Path) -> None:
    is_over, missing = threading.Event(), []

    def look() -> None:
        while not is_over.is_set():
            if not (copy / "bundle.json").exists():
                missing.append(1)

    with Bundle.open(copy) as bundle, ThreadPoolExecutor(1) as pool:
        looked = pool.submit(look)
        for _ in range(30):
            rewrite_bundle(copy, copy, thresholds=bundle.thresholds, model_card="# new\n")
        is_over.set()
        looked.result(60)
    assert not missing


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (list(rows()[:5].split(2)), "5 rows for 7 classes"),
        ([rows(), rows()[:1]], "8 rows for 7 classes"),
        ([rows(bias=False)], r"\[7, 16\] instead of \[rows, 17\]"),
        (
            [rows()[:4], torch.full((3, DIM + 1), torch.nan)],
            r"row 4 of .+ contains NaN or infinity",
        ),
    ],
)
def test_a_failed_write_raises_and_leaves_no_files(
    tmp_path: Path, blocks: list[Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "b", blocks=blocks)
    assert list(tmp_path.iterdir()) == []


def test_class_names_must_be_unique_and_match_the_number_of_classes(tmp_path: Path) -> None:
    cat = ClassInfo(name="cat")
    for entries, message in (
        ([cat] * 7, "class 'cat' is listed twice"),
        ([cat], "1 classes, expected 7"),
        ([], "the class list is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            write(tmp_path / "b", entries=entries)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------- damage


def edit(path: Path, **changes: object) -> None:
    file = path / "bundle.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def update_size(path: Path, name: str) -> None:
    """Update the size that bundle.json lists for a file."""
    files = json.loads((path / "bundle.json").read_text())["files"]
    files[name]["bytes"] = (path / name).stat().st_size
    edit(path, files=files)


def flip_last_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def set_length(file: Path, length: int) -> None:
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])


def add_file(path: Path) -> None:
    files = json.loads((path / "bundle.json").read_text())["files"]
    edit(path, files={**files, "../secret": {"bytes": 0, "sha256": "0" * 64}})


def swap_shape(path: Path) -> None:
    file = path / WEIGHTS
    file.write_bytes(file.read_bytes().replace(b"[7,17]", b"[17,7]"))


WEIGHTS = "class_weights.safetensors"
DAMAGED = {
    "old format": (
        lambda path: edit(path, format_version=1, surprise=True),
        "format 1.* reads formats 2 to 6: export the run again",
    ),
    "new format": (
        lambda path: edit(path, format_version=7, surprise=True),
        "format 7.* reads formats 2 to 6: update kway",
    ),
    **{
        f"JSON {number}": (
            lambda path, content=content: (path / "bundle.json").write_bytes(content),
            r"bundle\.json is damaged",
        )
        for number, content in enumerate((b"{", b"[]", b"[" * 100_000, b"\xff"))
    },
    "unknown key": (lambda path: edit(path, surprise=1), r"bundle\.json: surprise: "),
    "name outside": (add_file, "outside the bundle"),
    "truncated": (
        lambda path: os.truncate(path / WEIGHTS, (path / WEIGHTS).stat().st_size - 4),
        rf"{WEIGHTS} has \d+ bytes instead of",
    ),
    "missing file": (
        lambda path: (path / "MODEL_CARD.md").unlink(),
        r"MODEL_CARD\.md is missing",
    ),
    "missing bundle": (lambda path: (path / "bundle.json").unlink(), "is not a bundle"),
    **{
        f"header {length}": (
            lambda path, length=length: set_length(path / WEIGHTS, length),
            WEIGHTS,
        )
        for length in (0, 2**63, 60)
    },
    "shape": (swap_shape, r"weights\.safetensors .*expected float32 \[7, 17\] as 'weight'"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_is_reported_when_a_bundle_is_opened(copy: Path, damage: str) -> None:
    spoil, message = DAMAGED[damage]
    spoil(copy)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Bundle.open(copy)


def test_verify_detects_a_flipped_bit(copy: Path) -> None:
    flip_last_bit(copy / WEIGHTS)
    with pytest.raises(ValueError, match=r"class_weights\.safetensors does not match"):
        Bundle.open(copy).verify()
    Bundle.open(copy).verify(class_weights=False)
    flip_last_bit(copy / "thresholds.safetensors")
    with pytest.raises(ValueError, match=r"thresholds\.safetensors does not match"):
        Bundle.open(copy).verify(class_weights=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("classes.safetensors", "6 classes instead of 7"),
        ("thresholds.safetensors", r"does not match bundle\.json"),
    ],
)
def test_tables_for_the_wrong_number_of_classes_are_rejected(
    copy: Path, name: str, message: str
) -> None:
    file = copy / name
    tables = {key: value[:-1].clone() for key, value in load_file(file).items()}
    save_file(tables, file)
    update_size(copy, name)
    with pytest.raises(ValueError, match=rf"{name} .*{message}"):
        Bundle.open(copy)
    file.write_bytes(b"\xff" * 100)
    update_size(copy, name)
    with pytest.raises(ValueError, match=rf"{name} is damaged"):
        Bundle.open(copy)


def test_the_class_list_of_earlier_bundles_is_read(copy: Path, tmp_path: Path) -> None:
    expected = Bundle.open(copy).classes
    as_format_5(copy)
    bundle = Bundle.open(copy)
    assert bundle.classes == expected
    assert bundle.thresholds is not None
    rewrite_bundle(copy, tmp_path / "new", thresholds=bundle.thresholds, model_card="")
    assert not (tmp_path / "new" / "classes.jsonl").exists()
    assert Bundle.open(tmp_path / "new").classes == expected


def test_a_damaged_class_list_is_reported(copy: Path) -> None:
    tables = load_file(copy / "classes.safetensors")
    tables["name_ends"][1] = 2**60
    save_file(tables, copy / "classes.safetensors")
    for class_id in (1, 2):
        with pytest.raises(ValueError, match="damaged"):
            Bundle.open(copy).classes[class_id]


def test_a_damaged_class_list_of_earlier_bundles_is_reported(copy: Path) -> None:
    as_format_5(copy)
    file = copy / "classes.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"husky"', b'"husky,'))
    with pytest.raises(ValueError, match=r"classes\.jsonl: line 1 is not a valid class"):
        Bundle.open(copy)


def test_backbone_weights_from_a_different_network_raise_a_one_line_error(copy: Path) -> None:
    file = copy / "encoder" / "config.json"
    file.write_bytes(file.read_bytes().replace(b'"embedding_size": 8', b'"embedding_size": 4'))
    with pytest.raises(ValueError, match=r"does not match encoder/config\.json") as caught:
        Bundle.open(copy).load_backbone()
    assert "\n" not in str(caught.value)
