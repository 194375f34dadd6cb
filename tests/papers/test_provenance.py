"""The key of a result covers the code that its job imports, the settings and, for timings, the
machine."""

from pathlib import Path

import pytest

from experiments.papers import job, provenance
from experiments.papers.job import Job


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
    ("name", "text", "is_same"),
    [
        ("a.py", "def f():\n    from heads import b\n    return -b.x\n", False),
        ("b.py", "x = 2\n", False),
        ("__init__.py", "from heads import c\n", False),
        ("c.py", "x = 2\n", True),
        ("b.py", '"""Doc."""\n\nx = 1  # one\n', True),
        ("a.py", 'def f():\n    """Doc."""\n    from heads import b\n    return (b.x)\n', True),
    ],
)
def test_the_digest_depends_on_the_code_that_a_job_runs_but_not_on_comments(
    package: Path, name: str, text: str, is_same: bool
) -> None:
    before = digest(package / "a.py")
    (package / name).write_text(text)
    assert (digest(package / "a.py") == before) == is_same


def test_a_job_depends_on_the_losses_but_not_on_the_page() -> None:
    reached = provenance.reached(Path(provenance.__file__).with_name("stacked_mlp.py"))
    names = {str(path.relative_to(Path(provenance.__file__).parents[2])) for path in reached}
    assert "heads/losses/max_margin.py" in names
    assert not {"experiments/papers/page.py", "experiments/papers/section.py"} & names


def test_only_timing_jobs_depend_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "experiments.spherical_cost:time_steps"
    other, timing = Job(name, {}), Job(name, {}, alone=True)
    before = other.key, timing.key
    monkeypatch.setattr(job, "hardware", lambda: "an abacus")
    assert other.key == before[0]
    assert timing.key != before[1]


def test_the_key_depends_on_settings_code_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "experiments.spherical_cost:time_steps"
    before = Job(name, {"rounds": 1}).key
    assert Job(name, {"rounds": 1}).key == before
    assert Job(name, {"rounds": 2}).key != before
    with monkeypatch.context() as patch:
        patch.setattr(job, "code_digest", lambda _file: "another")
        assert Job(name, {"rounds": 1}).key != before
    monkeypatch.setattr(job.torch, "__version__", "1.0")
    assert Job(name, {"rounds": 1}).key != before
