"""Tokenizer training is deterministic, and opened tokenizers match AutoTokenizer."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import AutoTokenizer

from data.shards.split import open_split
from data.shards.writing.writer import write_shards
from data.sources import EmojiNames
from data.text.tokenizer import Tokenizer, open_tokenizer
from data.text.tokenizer_training import train_tokenizer, train_wordpiece
from tests.data.conftest import contents, open_index, overwrite
from tests.shards import image_shards

TEXTS = [
    "up-right arrow",
    "i  MARK [MASK]",
    "마지막 트랙 버튼",
    "右カーブ矢印 2",
    "símbolo 🦆 registrado\u0000",
    "",
]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 480 training names of 40 emoji in 12 languages, and 80 test names in two others."""
    folder = tmp_path_factory.mktemp("names") / "texts"
    write_shards(EmojiNames(40), folder, workers=0)
    return folder


@pytest.fixture(scope="module")
def folder(names: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a shared tokenizer. Tests that change it must copy it first."""
    out = tmp_path_factory.mktemp("tokenizer") / "names"
    train_tokenizer(names, out, vocab_size=700)
    return out


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# ---------------------------------------------------------------------------- opening


def test_ids_match_auto_tokenizer_and_truncation_keeps_the_last_token(folder: Path) -> None:
    ids = open_tokenizer(str(folder), max_length=6).encode(TEXTS)
    theirs = AutoTokenizer.from_pretrained(folder)(TEXTS, truncation=True, max_length=6)
    assert ids == theirs["input_ids"]
    assert max(map(len, ids)) == 6
    assert all((row[0], row[-1]) == (2, 3) for row in ids)


@pytest.mark.parametrize("template", ["[CLS] [SEP] $A", "$A [SEP]", "$A", "[SEP] $A $A", None])
def test_special_tokens_are_those_that_the_library_adds(template: str | None) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "words", "number"]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if template is not None:
        special = [(word, i) for i, word in enumerate(words) if word in template]
        backend.post_processor = processors.TemplateProcessing(template, special_tokens=special)
    texts = ["the words", "", "number number 1 words the number", "[CLS] the"]
    theirs = Backend.from_str(backend.to_str())
    opened = Tokenizer.of(backend, {"pad_token": "[PAD]"}, max_length=6, name="x")
    theirs.enable_truncation(6)
    assert opened.encode(texts) == [each.ids or [0] for each in theirs.encode_batch(texts)]


@pytest.mark.parametrize("opened_by", ["files", "transformers"])
@pytest.mark.parametrize("stored_in", ["tokenizer_config.json", "tokenizer.json"])
def test_texts_are_truncated_on_the_side_that_the_tokenizer_states(
    stored_in: str, opened_by: str, copy: Path, tmp_path: Path
) -> None:
    if stored_in == "tokenizer_config.json":
        edit(copy / stored_in, truncation_side="left")
    else:
        stored = Backend.from_file(str(copy / stored_in))
        stored.enable_truncation(6, direction="left")
        stored.save(str(copy / stored_in))
    if opened_by == "transformers":
        (copy / "config.json").write_text(json.dumps({"model_type": "bert"}))
    theirs = AutoTokenizer.from_pretrained(copy)
    ours = open_tokenizer(str(copy), max_length=6)
    ours.save(tmp_path / "saved")
    again = open_tokenizer(str(tmp_path / "saved"), max_length=6)
    expected = theirs(TEXTS, truncation=True, max_length=6)["input_ids"]
    assert ours.truncation_side == theirs.truncation_side == "left"
    assert ours.encode(TEXTS) == again.encode(TEXTS) == expected
    assert ours.digest() == again.digest()
    sent = pickle.loads(pickle.dumps(ours))
    assert (sent.encode(TEXTS), sent.digest()) == (expected, ours.digest())
    edit(copy / "tokenizer_config.json", truncation_side="right")
    right = open_tokenizer(str(copy), max_length=6)
    assert right.encode(TEXTS) != expected
    assert right.digest() != ours.digest()


def test_a_setting_that_files_do_not_contain_has_no_effect(copy: Path, tmp_path: Path) -> None:
    edit(copy / "tokenizer_config.json", split_special_tokens=True)
    (copy / "config.json").write_text(json.dumps({"model_type": "bert"}))
    ours = open_tokenizer(str(copy), max_length=6)
    ours.save(tmp_path / "saved")
    again = open_tokenizer(str(tmp_path / "saved"), max_length=6)
    assert ours.encode(TEXTS) == again.encode(TEXTS)


def test_a_tokenizer_without_a_usable_unknown_token_raises() -> None:
    backend = Backend(models.WordPiece({"a": 0, "[PAD]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match=r"tokenizer x cannot encode unknown .*kway tokenizer SHA"):
        Tokenizer.of(backend, {"pad_token": "[PAD]"}, max_length=4, name="x")


def test_an_unpaired_surrogate_raises_an_error_that_states_its_position(folder: Path) -> None:
    tokenizer = open_tokenizer(str(folder), max_length=6)
    with pytest.raises(ValueError, match=r"text 1 is not valid Unicode: .* at character 2"):
        tokenizer.encode(["good", "no\ud83e"])


FORKED = """
import sys
from pathlib import Path
from torch.utils.data import DataLoader
from data.text.tokenizer import open_tokenizer
from data.text.tokenizer_training import train_tokenizer

class Texts(list):
    def __getitem__(self, i):
        return tokenizer.encode([list.__getitem__(self, i)] * 20)[0]

shards, out = sys.argv[1:]
train_tokenizer(Path(shards), Path(out), vocab_size=700)
tokenizer = open_tokenizer(out, max_length=6)
texts = Texts(["up-right arrow", "a b c", "d e f"] * 4)
wanted = [texts[i] for i in range(len(texts))]
loader = DataLoader(texts, batch_size=None, num_workers=2, multiprocessing_context="fork")
assert list(loader) == wanted
assert "transformers" not in sys.modules  # importing it takes seconds in each process
"""


def test_forked_workers_encode_silently_after_the_parent_used_threads(
    names: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's threads do not survive a fork. If the library used them, a child would hang."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    out = tmp_path / "out"
    command = [sys.executable, "-W", "ignore", "-c", FORKED, names, out]
    ran = subprocess.run(command, timeout=240, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert contents(out) == contents(folder)


# ---------------------------------------------------------------------------- errors


def test_a_missing_folder_raises_an_error_that_states_the_training_command(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a folder: train one with kway tokenizer"):
        open_tokenizer(str(tmp_path / "nothing"), max_length=6)


def test_a_hub_name_is_opened_by_transformers_and_errors_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer hub:b: b is a local file or folder"):
        open_tokenizer("hub:b", max_length=6)
    with pytest.raises(ValueError, match=r"tokenizer hub:a/b/c cannot be opened .*'a/b/c'"):
        open_tokenizer("hub:a/b/c", max_length=6)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["[]", "\xff"])
def test_a_damaged_file_raises_an_error_that_names_it(copy: Path, file: str, content: str) -> None:
    (copy / file).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"{file} is damaged .*: copy it again, or"):
        open_tokenizer(str(copy), max_length=6)


def test_a_slow_tokenizer_raises(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    with pytest.raises(ValueError, match=r"is not a fast tokenizer \(ByT5Tokenizer\)"):
        open_tokenizer(str(tmp_path), max_length=6)


def test_code_in_a_tokenizer_folder_is_not_executed(copy: Path) -> None:
    (copy / "mine.py").write_text("raise SystemExit('run')")
    auto = {"AutoTokenizer": [None, "mine.Tokenizer"]}
    edit(copy / "tokenizer_config.json", auto_map=auto, tokenizer_class="MyTokenizer")
    with pytest.raises(ValueError, match="cannot be opened"):
        open_tokenizer(str(copy), max_length=6)


def test_a_max_length_that_only_fits_special_tokens_raises(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"max_length is 2, but .* adds 2 .*set it to 3 or more"):
        open_tokenizer(str(folder), max_length=2)
    assert len(open_tokenizer(str(folder), max_length=3).encode(["arrow up"])[0]) == 3


# ---------------------------------------------------------------------------- training


def test_special_tokens_come_first_followed_by_single_characters(folder: Path) -> None:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    by_id = sorted(vocabulary, key=vocabulary.get)
    assert by_id[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert list(vocabulary.values()) == list(range(700))
    assert {"##o", "矢", "버"} <= set(by_id)
    assert "##矢" not in by_id  # a Chinese character is a word
    assert max(map(len, by_id)) > 4


def test_words_too_long_for_encoding_are_not_used_for_training() -> None:
    """The library's trainer takes minutes to process a word of one megabyte."""
    words, long = "up up down down", "z" * 10_000
    texts = [words, f"{long} {words}", f"q{long},z {words}", f"{'猫' * 400} y{'z' * 299}"]
    backend = train_wordpiece(texts, vocab_size=60)
    vocabulary = backend.get_vocab().keys()
    assert {"up", "down", "z", "y", "猫"} <= vocabulary
    assert "q" not in vocabulary
    assert backend.encode(f"{long} up").tokens == ["[CLS]", "[UNK]", "up", "[SEP]"]


def test_held_out_texts_are_used_for_evaluation_and_not_for_training(
    names: Path, tmp_path: Path
) -> None:
    trained = train_tokenizer(names, tmp_path / "t", vocab_size=700)
    assert (trained.texts, trained.held_out) == (456, 24)
    assert trained.vocab_size == 700
    assert 0 < trained.unknown < 0.2
    assert 1 < trained.tokens_per_text < 20


def test_an_output_path_that_cannot_be_written_raises_before_anything_is_read(
    names: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    done: list[int] = []
    with pytest.raises(FileExistsError, match=f"{tmp_path}/file'$"):
        train_tokenizer(
            names, tmp_path / "file/name", report=lambda number, total: done.append(number)
        )
    assert not done


def test_the_command_lists_and_counts_damaged_texts(kway, capsys, names, tmp_path) -> None:
    copy = Path(shutil.copytree(names, tmp_path / "copy"))
    for row in (7, 300):
        offset = int(open_index(copy / "train-000000.tar").blocks[row, 0]) * 512
        overwrite(copy / "train-000000.tar", offset, b"\xff")
    with open_split(copy, "train") as split:
        keys = [split.key(7), split.key(300)]
    assert kway("tokenizer", copy, "-o", tmp_path / "t") == 0
    printed = capsys.readouterr()
    assert [sum(key in line for line in printed.err.splitlines()) for key in keys] == [1, 1]
    assert " 2 bad texts" in printed.err
    assert "held-out" in printed.out.splitlines()[-1]


def test_the_command_rejects_images_and_existing_folders(
    kway, capsys, names, folder, tmp_path, monkeypatch
) -> None:
    images = image_shards(tmp_path)
    before = contents(folder)
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        ((images, "-o", tmp_path / "t"), "contains images: kway tokenizer requires texts"),
        ((names, "-o", folder), "already exists: choose another folder, or delete it"),
        ((names, "-o", tmp_path / "t", "--split", "none"), "none"),
        ((names, "-o", "file/t"), "file/t cannot be written (File exists): choose another path"),
    ):
        assert kway("tokenizer", *arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert contents(folder) == before
    assert list(tmp_path.glob("t*")) == []
