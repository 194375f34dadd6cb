"""The measures, the words and the table of the benchmark of extreme classification."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from benchmarks import extreme
from data.text.tokenizer import open_tokenizer
from trainer.recipe import load_recipe

TRUE = sp.csr_matrix(np.array([[1, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0]], np.float32))


def test_precision_counts_the_true_labels_among_the_best() -> None:
    found = extreme.measures([[0, 3, 1, 4, 5], [0, 1, 3, 4, 2]], TRUE, np.ones(6), 10)
    assert found["P@1"] == pytest.approx(100 / 2)
    assert found["P@3"] == pytest.approx(100 * (2 / 3 + 0) / 2)
    assert found["P@5"] == pytest.approx(100 * (2 / 5 + 1 / 5) / 2)
    # The highest possible sums are 1 + 1, 2 + 1 and 2 + 1.
    assert found["PSP@1"] == pytest.approx(100 * 1 / 2)
    assert found["PSP@3"] == pytest.approx(100 * 2 / 3)
    assert found["PSP@5"] == pytest.approx(100 * 3 / 3)


def test_rare_labels_weigh_more_in_the_scored_precision() -> None:
    counts = np.array([90, 1, 90, 90, 90, 90])
    found = extreme.measures([[0, 3, 4, 5, 2], [2, 0, 1, 3, 4]], TRUE, counts, 100)
    constant = (math.log(100) - 1) * 2.5**0.55
    often, rarely = (1 + constant * (count + 1.5) ** -0.55 for count in (90, 1))
    assert found["PSP@1"] == pytest.approx(100 * 2 * often / (rarely + often))
    assert found["PSP@5"] == pytest.approx(100 * 2 * often / (rarely + 2 * often))


def test_missing_predictions_do_not_count() -> None:
    found = extreme.measures([[0], []], TRUE, np.ones(6), 10)
    assert found["P@1"] == pytest.approx(100 / 2)
    assert found["P@5"] == pytest.approx(100 * (1 / 5) / 2)


def test_kway_gets_the_words_of_the_other_libraries(tmp_path: Path) -> None:
    from sklearn.feature_extraction.text import TfidfVectorizer  # slow to import

    texts = ["Été of the C++ library libc6-dev_2", "a naïve-FOX\nfox's 東京 x 2048"]
    rows = [{"text": text, "labels": ["a"]} for text in texts]
    vectorizer = TfidfVectorizer().fit(texts[:1])
    splits = {"train": rows[:1], "test": [{**rows[1], "labels": ["a", "unknown"]}]}
    extreme.write_for_kway(splits, vectorizer.vocabulary_, tmp_path)
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer"), max_length=256)
    known, unknown = tokenizer.encode(texts)
    of_number = {number + 2: word for word, number in vectorizer.vocabulary_.items()}
    assert [of_number[each] for each in known] == vectorizer.build_analyzer()(texts[0])
    assert unknown == [1] * len(vectorizer.build_analyzer()(texts[1]))
    lines = [json.loads(line) for line in (tmp_path / "table.jsonl").read_text().splitlines()]
    assert [line["labels"] for line in lines] == [["a"]] * 3
    assert [line["split"] for line in lines] == ["train", "test", "probe"]
    for loss in extreme.LOSSES.values():
        settings = ["run=unused", "data.shards=unused", f"head.loss={json.dumps(loss)}"]
        assert load_recipe(tmp_path / "recipe.yaml", settings).head.init == "means"


def test_the_table_has_the_mean_and_the_interval_of_the_seeds() -> None:
    values = dict.fromkeys(extreme.MEASURES, 10.0)
    times = {"cpu_seconds": 8.0, "peak_mb": 100.0}
    runs = [
        {"library": "omikuji", "seed": seed, **values, "seconds": seconds, **times}
        for seed, seconds in enumerate((4.0, 6.0))
    ]
    *_, line = extreme.table({"runs": runs}).splitlines()
    error = 12.706  # Student's t times sqrt(2) / sqrt(2)
    assert line.startswith("| omikuji | 10.0 | 10.0")
    assert line.endswith(f"| 5 ± {error:.0f} | 8 | 100 |")


def test_the_page_has_the_table_of_the_stored_results() -> None:
    results = json.loads(Path("benchmarks/extreme.json").read_text())
    assert extreme.table(results) in Path("docs/extreme.md").read_text(encoding="utf-8")
