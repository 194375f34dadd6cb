"""Characters as classes: their selection, their images, and the held-out faces."""

import unicodedata

import numpy as np

from data.images.decode import decode
from data.images.fonts import face_characters
from data.sources import Glyphs
from data.sources.glyphs import TEST_FACES


def test_characters_that_look_the_same_are_one_class(all_glyphs: Glyphs) -> None:
    label = {
        character: number
        for number, info in enumerate(all_glyphs.classes())
        for character in info.attributes["characters"]
    }
    for same in ("AΑА", "oοо", "TΤТ", "ΩΩ", "-‐"):
        assert len({label[c] for c in same}) == 1, same
    for different in ("Oo0Q", "1lI", "аạ", "KК", "ЗЭ3", "āãâ", ".,", "εє", "nп"):
        assert len({label[c] for c in different}) == len(different), different
    info = all_glyphs.classes()[label["A"]]
    assert info.name == "LATIN CAPITAL LETTER A"
    assert info.attributes["characters"] == "AΑА"
    assert info.attributes["unicode_name"].endswith("/ CYRILLIC CAPITAL LETTER A")
    assert info.attributes["path"] == "Basic Latin > Basic Latin, capital letters"


def test_every_class_has_a_unique_name_and_a_path(all_glyphs: Glyphs) -> None:
    infos = all_glyphs.classes()
    assert len({info.name for info in infos}) == len(infos)
    paths = {info.attributes["path"] for info in infos}
    assert paths >= {
        "Greek and Coptic > Greek and Coptic, small letters",
        "Arrows > Arrows, symbols",
        "Lao > Lao, marks",
    }
    assert not any(path.startswith("No_Block") for path in paths)


def test_tex_faces_have_only_characters_with_matching_glyph_names() -> None:
    faces = face_characters()
    assert not {"LastResortHE-Regular", "cmex10", "cmmi10", "cmsy10"} & faces.keys()
    assert ord("A") in faces["cmr10"]
    # In cmr10, the code of the backslash draws an opening quote, and the code of ¡ draws a Gamma.
    assert not {ord("\\"), ord("<"), ord("¡")} & faces["cmr10"]
    assert ord("\\") in faces["cmtt10"]


def test_train_and_test_styles_are_disjoint_and_cover_all_classes(all_glyphs: Glyphs) -> None:
    splits = all_glyphs.splits()
    assert {task.face for task in splits["test"]} <= set(TEST_FACES)
    assert not {task.face for task in splits["train"]} & set(TEST_FACES)
    everything = set(range(len(all_glyphs.classes())))
    assert {task.label for task in splits["train"]} == everything
    assert {task.label for task in splits["test"]} == everything


def test_most_test_images_do_not_occur_in_training(all_glyphs: Glyphs) -> None:
    """If all faces of a class share one drawing (Braille, boxes), it keeps one test image."""
    images = all_glyphs._drawings
    splits = all_glyphs.splits()
    trained = {(t.label, images[t.code][t.face]) for t in splits["train"]}
    tests_of: dict[int, list[bool]] = {}
    for task in splits["test"]:
        tests_of.setdefault(task.label, []).append(
            (task.label, images[task.code][task.face]) in trained
        )
    for repeated in tests_of.values():
        assert not any(repeated) or len(repeated) == 1
    share = [tests_of[label][0] for label in sorted(tests_of)]
    assert np.mean(share[:1000]) < 0.06
    assert np.mean(share) < 0.25


def test_images_have_ink_and_are_not_clipped(all_glyphs: Glyphs) -> None:
    splits = all_glyphs.splits()
    for tasks in (splits["train"][::37], splits["test"][::7]):
        for task in tasks:
            image = 255 - decode(all_glyphs.render(task).data, 1)[:, :, 0]
            assert image.max() > 40, task
            edges = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
            assert edges.max() < 60, task


def test_test_images_are_undistorted_and_training_images_vary(all_glyphs: Glyphs) -> None:
    source = Glyphs(samples=4)
    task = all_glyphs.splits()["train"][0]
    variants = [source.render(task._replace(variant=v)) for v in range(4)]
    assert len({sample.data for sample in variants}) == len({s.key for s in variants}) == 4
    assert source.render(task).data == Glyphs().render(task).data
    assert source.render(task).data != Glyphs(seed=1).render(task).data
    plain = task._replace(variant=-1)
    assert source.render(plain).data == Glyphs(seed=1).render(plain).data


def test_a_class_limit_keeps_the_first_classes(all_glyphs: Glyphs) -> None:
    few = Glyphs(30, samples=1, size=20)
    few.__dict__["_drawings"] = all_glyphs._drawings
    infos = few.classes()
    assert infos == all_glyphs.classes()[:30]
    assert few.label_vectors().shape[0] == 30
    for task in few.splits()["test"]:
        sample = few.render(task)
        assert decode(sample.data, 1).shape == (20, 20, 1)
        character = chr(int(sample.key.split("-")[0], 16))
        assert character in infos[sample.label].attributes["characters"]
        assert unicodedata.name(character) in infos[sample.label].attributes["unicode_name"]
