"""The site has an entry for every public name, its search leads to the guides, and broken links
fail its build."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.site.reference import PACKAGES, reference

ROOT = Path(__file__).parents[1]
# The project's own configuration, but without the API reference, which takes a minute.
CONFIG = f"""
INHERIT: {ROOT}/mkdocs.yml
docs_dir: docs
site_dir: site
theme: {{name: mkdocs}}
hooks: [{ROOT}/docs/site/repository.py]
plugins: [search]
nav: [index.md, page.md, contributing.md, changelog.md]
"""
GUIDES = ("start", "data", "training", "heads", "serving", "cluster")


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a folder as `make check` does."""
    make = ["make", "--dry-run", "--directory", str(ROOT), "VENV=.venv", "check"]
    commands = subprocess.run(make, capture_output=True, text=True, check=True, timeout=60).stdout
    (line,) = [line for line in commands.splitlines() if "mkdocs build" in line]
    command = line.partition("#")[0].replace(".venv/bin/mkdocs", f"{sys.executable} -m mkdocs")
    options = {"capture_output": True, "text": True, "timeout": 240}
    return subprocess.run(command, cwd=folder, shell=True, check=False, **options)


@pytest.mark.parametrize(
    ("links", "named"),
    [
        (["page.md#parts", "pages.md"], ["page.md#parts", "pages.md", "other.md"]),
        (["../recipes/b.yaml"], ["recipes/b.yaml"]),  # ends the build
    ],
)
def test_broken_links_and_a_page_outside_the_navigation_fail_the_check(tmp_path, links, named):
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text(CONFIG, encoding="utf-8")
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/page.md", "docs/other.md"):
        (tmp_path / page).write_text("# Title\n", encoding="utf-8")
    with (tmp_path / "docs/page.md").open("a", encoding="utf-8") as file:
        file.writelines(f"[broken]({link})\n" for link in links)
    done = build(tmp_path)
    assert done.returncode != 0
    assert [name for name in named if name not in done.stderr] == []


@pytest.fixture(scope="module")
def sections(tmp_path_factory) -> dict[str, str]:
    """The titles of the sections of the six guides in the search index, by location."""
    folder = tmp_path_factory.mktemp("site")
    config = CONFIG.replace("docs_dir: docs", f"docs_dir: {ROOT}/docs").partition("nav:")[0]
    (folder / "mkdocs.yml").write_text(config, encoding="utf-8")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    index = json.loads((folder / "site/search/search_index.json").read_text(encoding="utf-8"))
    return {
        entry["location"]: entry["title"]
        for entry in index["docs"]
        if entry["location"].partition(".")[0] in GUIDES
    }


@pytest.mark.parametrize(
    ("query", "location"),
    [
        ("quickstart", "start.html#quickstart"),
        ("resume", "training.html#resume-a-run"),
        ("FSDP", "training.html#strategies-ddp-fsdp-and-deepspeed"),
        ("out of memory", "training.html#out-of-memory"),
        ("accuracy", "training.html#accuracy-and-evaluation"),
        ("own dataset", "data.html#your-own-dataset"),
    ],
)
def test_a_search_leads_to_the_section_of_a_guide(sections, query, location):
    """The search ranks titles before texts."""
    words = set(query.lower().split())
    found = [
        where
        for where, title in sections.items()
        if words <= set(re.findall(r"\w+", title.lower()))
    ]
    assert found == [location]


def public_names(package: str) -> set[str]:
    """Return the top-level public classes and functions of the package's public modules."""
    folder = ROOT / package.replace(".", "/")
    return {
        node.name
        for path in folder.rglob("*.py")
        if not path.stem.startswith("_")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_contains_every_public_class_and_function(package):
    text = "\n".join(reference(package, ROOT).values())
    names = public_names(package)
    assert len(names) > 5
    assert [name for name in names if not re.search(rf"(::: .*\.|'){name}(\n|')", text)] == []
