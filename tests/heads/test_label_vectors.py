"""Label vectors: all file formats give the same rows, and names match in any spelling."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from heads.tree import load_label_vectors, project, read_label_vectors

WORDS = ["dog", "New_York", "cat", "ice", "cream", "short-haired", "☀", "Apple", "apple"]
VECTORS = np.random.default_rng(0).normal(size=(len(WORDS), 5)).astype(np.float32)


def write_text(path: Path, *, header: bool, end: str = "", opener=open) -> None:
    with opener(path, "wb") as file:
        if header:
            file.write(f"{len(WORDS)} 5\n".encode())
        for word, vector in zip(WORDS, VECTORS, strict=True):
            numbers = " ".join(repr(float(x)) for x in vector)
            file.write(f"{word} {numbers}{end}\n".encode())


def write_binary(path: Path, *, newline: bytes) -> None:
    with path.open("wb") as file:
        file.write(f"{len(WORDS)} 5\n".encode())
        for word, vector in zip(WORDS, VECTORS, strict=True):
            file.write(word.encode() + b" " + vector.astype("<f4").tobytes() + newline)


def write_file(folder: Path, kind: str) -> Path:
    path = folder / kind.split()[-1]
    match kind:
        case "word2vec words.bin":
            write_binary(path, newline=b"")
        case "old word2vec words.bin":
            write_binary(path, newline=b"\n")
        case "word2vec words.txt":
            write_text(path, header=True)
        case "glove words.txt":
            write_text(path, header=False)
        case "fasttext words.vec.gz":
            write_text(path, header=True, end=" ", opener=gzip.open)
        case "words.npz":
            np.savez(path, vectors=VECTORS, names=WORDS)
    return path


FORMATS = [
    "word2vec words.bin",
    "old word2vec words.bin",
    "word2vec words.txt",
    "glove words.txt",
    "fasttext words.vec.gz",
    "words.npz",
]


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_with_names_gives_the_same_vectors(tmp_path, kind):
    path = write_file(tmp_path, kind)
    names, vectors = read_label_vectors(path)
    assert names == WORDS
    assert np.array_equal(vectors, VECTORS)
    vectors, missing = load_label_vectors(path, ["cat", "dog"])
    assert np.array_equal(vectors, VECTORS[[2, 0]])
    assert missing == []


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_rows_without_names_are_in_class_order(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    if suffix == ".npy":
        np.save(path, VECTORS.astype(np.float64))
    else:
        np.savez_compressed(path, vectors=VECTORS)
    vectors, missing = load_label_vectors(path, [f"class {i}" for i in range(len(WORDS))])
    assert vectors.dtype == np.float32
    assert np.array_equal(vectors, VECTORS)
    assert missing == []
    assert read_label_vectors(path)[0] is None
    with pytest.raises(ValueError, match="9 rows without names, but there are 2 classes"):
        load_label_vectors(path, ["a", "b"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("DOG", ["dog"]),
        ("new york", ["New_York"]),
        ("  New  York ", ["New_York"]),
        ("☀️", ["☀"]),
        ("apple", ["apple"]),
        ("Apple", ["Apple"]),
        ("APPLE", ["Apple"]),  # the first match in the file, which is the most frequent
        ("ice_cream", ["ice", "cream"]),
        ("cream, ice", ["ice", "cream"]),
        ("Short-haired cat", ["short-haired", "cat"]),
        ("dog-cat", ["dog", "cat"]),
        ("cat of unknown", ["cat"]),
        ("New York cat", ["cat"]),  # words are matched one by one, and York is not in the file
    ],
)
def test_names_match_in_any_spelling(tmp_path, name, words):
    path = write_file(tmp_path, "glove words.txt")
    expected = VECTORS[[WORDS.index(word) for word in words]].mean(0)
    assert load_label_vectors(path, [name])[0][0] == pytest.approx(expected, abs=1e-6)


def test_missing_names_raise_an_error_unless_a_policy_is_set(tmp_path):
    path = write_file(tmp_path, "words.npz")
    names = ["dog", "zebra", "cat", "okapi"]
    with pytest.raises(ValueError, match=r"for 2 of 4 class names \('zebra', 'okapi'\)"):
        load_label_vectors(path, names)
    mean = VECTORS[[0, 2]].mean(0)
    for policy, filler in (("mean", mean), ("zero", np.zeros(5))):
        vectors, missing = load_label_vectors(path, names, missing=policy)
        assert missing == ["zebra", "okapi"]
        assert vectors == pytest.approx(np.stack([VECTORS[0], filler, VECTORS[2], filler]))
        with pytest.raises(ValueError, match="for any of the 1 class names"):
            load_label_vectors(path, ["zebra"], missing=policy)


@pytest.mark.parametrize(
    "kind", ["word2vec words.bin", "word2vec words.txt", "fasttext words.vec.gz"]
)
def test_a_truncated_file_is_rejected(tmp_path, kind):
    path = write_file(tmp_path, kind)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"truncated|damaged|gzip"):
        load_label_vectors(path, ["dog", "apple"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.vec", b"2 3\ndog 1 2 3\ncat 1 2\n", "word 2 does not have 3 numbers"),
        ("a.txt", b"dog 1 2 3\ncat 1 x 3\n", "'cat' contains text that is not a number"),
        ("a.txt", b"dog 1 2 3\ncat 1 nan 3\n", "'cat' contains NaN"),
        ("a.txt", b"", "contains no word vectors"),
        ("a.bin", b"", "not a word2vec binary file"),
        ("a.npy", b"hello", "not a valid .npy"),
        ("a.npz", b"hello", "not a valid .npz"),
        ("a.pkl", b"hello", "unknown suffix '.pkl': use one of .npy"),
    ],
)
def test_an_invalid_vector_file_raises_a_one_line_error(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_label_vectors(path, ["dog", "cat"])
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", ["gone.npy", "gone.bin", "gone.vec"])
def test_the_error_names_a_missing_file(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="gone"):
        load_label_vectors(tmp_path / name, ["dog"])


def test_pickled_arrays_are_not_loaded(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "a.npz", vectors=np.array([{}], dtype=object))
    for name in ("a.npy", "a.npz"):
        with pytest.raises(ValueError, match="not a valid"):
            read_label_vectors(tmp_path / name)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"vectors": np.ones(3)}, r"shape \[3\]"),
        ({"vectors": np.array([["a"]])}, "<U1"),
        ({"vectors": np.array([[np.inf]])}, "contains NaN, infinity"),
        ({"vectors": np.ones((2, 2)), "names": np.array(["a"])}, "1 names, but 2 vectors"),
        ({"rows": np.ones((2, 2))}, "has only the arrays rows: rename the array"),
    ],
)
def test_invalid_arrays_are_rejected(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        read_label_vectors(tmp_path / "a.npz")


def test_projection_preserves_distances_between_unit_rows_of_a_subspace():
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(40, 4)) @ np.linalg.qr(rng.normal(size=(30, 4)))[0].T
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    projected = project(3 * rows, 4)
    assert projected.shape == (40, 4)
    for points in (unit, projected):
        points -= points.mean(0)
    assert projected @ projected.T == pytest.approx(unit @ unit.T, abs=1e-6)
