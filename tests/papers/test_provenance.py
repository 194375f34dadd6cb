"""A result's provenance covers the code that the job imports, and no other code."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.papers import provenance
from experiments.papers.job import Job
from experiments.papers.provenance import Provenance


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """heads/a.py imports heads/b.py in a function; nothing imports heads/c.py."""
    monkeypatch.setattr(provenance, "_ROOT", tmp_path)
    folder = tmp_path / "heads"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "a.py").write_text("def f():\n    from heads import b\n    return b.x\n")
    (folder / "b.py").write_text("x = 1\n")
    (folder / "c.py").write_text("x = 1\n")
    return folder


def digest(file: Path) -> str:
    provenance.code_digest.cache_clear()
    provenance._parsed.cache_clear()
    return provenance.code_digest(file)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "def f():\n    from heads import b\n    return -b.x\n"),
        ("b.py", "x = 2\n"),
        ("__init__.py", "y = 1\n"),
    ],
)
def test_changing_code_that_a_job_runs_changes_the_digest(
    package: Path, name: str, text: str
) -> None:
    before = digest(package / "a.py")
    (package / name).write_text(text)
    assert digest(package / "a.py") != before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.py", "x = 2\n"),
        ("b.py", '"""Doc."""\n\nx = 1  # one\n'),
        ("a.py", 'def f():\n    """Doc."""\n    from heads import b\n    return (b.x)\n'),
    ],
)
def test_changing_other_code_or_comments_keeps_the_digest(
    package: Path, name: str, text: str
) -> None:
    before = digest(package / "a.py")
    (package / name).write_text(text)
    assert digest(package / "a.py") == before


def test_a_training_job_depends_on_the_training_code_but_not_on_the_page() -> None:
    reached = provenance.reached(Path(provenance.__file__).with_name("training.py"))
    names = {str(path.relative_to(Path(provenance.__file__).parents[2])) for path in reached}
    assert {"heads/engine/engine.py", "trainer/train.py"} <= names
    assert not {"experiments/papers/page.py", "experiments/papers/section.py"} & names


def test_only_timing_jobs_depend_on_the_machine() -> None:
    settings: dict[str, object] = {}
    job = Job("experiments.spherical_cost:time_steps", settings)
    timing = Job("experiments.spherical_cost:time_steps", settings, alone=True)
    assert Provenance.of(job).machine == ""
    now = Provenance.of(timing)
    assert now.machine
    assert now.outdated() == ()
    assert replace(now, machine="an abacus").outdated() == ("timed on an abacus",)


def test_a_result_from_a_removed_file_is_marked_as_older_code() -> None:
    now = Provenance.of(Job("experiments.spherical_cost:time_steps", {}))
    assert replace(now, source="experiments/papers/removed.py").outdated() == ("older code",)
