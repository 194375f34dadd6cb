"""A tiny ImageNet: tars of tars, and the devkit."""

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from scipy.io import savemat

from tests.data.foreign_tars import tar_of
from tests.noise_images import image

# (WNID, words, gloss, children by ID, images). The ID is the 1-based position in this tuple. As in
# the real devkit, the classes come first and are not sorted by WNID.
SYNSETS = (
    ("n02119789", "kit fox, Vulpes macrotis", "small grey fox", (), 4),
    ("n02100735", "English setter", "an English breed", (), 3),
    ("n01440764", "tench, Tinca tinca", "freshwater dace-like game fish", (), 3),
    ("n00001740", "entity", "that which is perceived to exist", (5, 6, 7), 0),
    ("n02083346", "canine, canid", "any of various fissiped mammals", (1, 7), 0),
    ("n01439121", "soft-finned fish", "", (3,), 0),
    ("n02084071", "dog", "a member of the genus Canis", (2,), 0),
)
CLASSES = ("n01440764", "n02100735", "n02119789")
# IDs of validation images 1 to 5.
TRUTH = (2, 1, 3, 3, 1)

Files = Mapping[str, bytes]


def training() -> dict[str, dict[str, bytes]]:
    """Return synset -> file name -> bytes, with as many images per synset as the devkit states."""
    return {
        wnid: {f"{wnid}_{i}.JPEG": image(100 * number + i, ending=".jpg") for i in range(count)}
        for number, (wnid, _, _, _, count) in enumerate(SYNSETS)
        if count
    }


def validation() -> dict[str, bytes]:
    return {
        f"ILSVRC2012_val_{i:08d}.JPEG": image(1000 + i, ending=".jpg")
        for i in range(1, len(TRUTH) + 1)
    }


def tar(files: Files) -> bytes:
    return tar_of(files.items(), tarfile.GNU_FORMAT)


def training_tar(classes: Mapping[str, Files]) -> bytes:
    return tar({f"{wnid}.tar": tar(files) for wnid, files in classes.items()})


def meta_mat(synsets: Iterable[tuple] = SYNSETS) -> bytes:
    """Return a struct array [N, 1] of cells, as MATLAB writes it. `children` of leaves is empty."""
    rows = [
        {
            "ILSVRC2012_ID": float(number),
            "WNID": wnid,
            "words": words,
            "gloss": gloss,
            "num_children": float(len(children)),
            "children": np.array([children], np.float64).reshape(1, -1),
            "wordnet_height": float(bool(children)),
            "num_train_images": float(images),
        }
        for number, (wnid, words, gloss, children, images) in enumerate(synsets, start=1)
    ]
    table = np.empty((len(rows), 1), dtype=[(name, object) for name in rows[0]])
    for i, row in enumerate(rows):
        table[i, 0] = tuple(row.values())
    buffer = io.BytesIO()
    savemat(buffer, {"synsets": table}, do_compression=True)
    return buffer.getvalue()


def devkit(meta: bytes | None = None, truth: Iterable[object] = TRUTH) -> bytes:
    """Return the content of ILSVRC2012_devkit_t12.tar.gz."""
    files = {
        "readme.txt": b"This is the documentation",
        "data/meta.mat": meta_mat() if meta is None else meta,
        "data/ILSVRC2012_validation_ground_truth.txt": "".join(f"{n}\n" for n in truth).encode(),
    }
    members = ((f"ILSVRC2012_devkit_t12/{name}", data) for name, data in files.items())
    return tar_of(members, mode="w:gz")


def write_tars(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "ILSVRC2012_img_train.tar").write_bytes(training_tar(training()))
    (folder / "ILSVRC2012_img_val.tar").write_bytes(tar(validation()))
    (folder / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(devkit())
    return folder
