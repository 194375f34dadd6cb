"""`python -m tests.size` finds cycles, private names of other libraries and small functions."""

from pathlib import Path

import pytest

from tests.size import ALLOWED, Code, findings, problems

# Lower this number when lines are removed.
NUM_ALLOWED = 71


def code_of(folder: Path, **files: str) -> Code:
    """Write a package `pack` of these modules and read it."""
    for name, text in {"__init__": "", **files}.items():
        path = folder / "pack" / f"{name.replace('__of__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Code.read(folder, ["pack"])


@pytest.mark.parametrize(
    "text",
    [
        "from pack.a import x",
        "def f():\n    import pack.a",
        "from .a import x",
        "from . import a",
        "from importlib import import_module\nimport_module('pack.a')",
    ],
    ids=["module", "local", "relative", "relative module", "dynamic"],
)
def test_a_cycle_between_files_is_found(text: str, tmp_path: Path) -> None:
    code = code_of(tmp_path, a="from pack.b import y", b=text)
    assert code.cycles() == [["pack.a", "pack.b"]]
    assert "cycle pack/a.py imports pack/b.py" in findings(code)


def test_imports_in_one_direction_are_not_a_cycle(tmp_path: Path) -> None:
    assert code_of(tmp_path, a="from pack.b import y", b="x = 1", c="import pack.a").cycles() == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from ray._private import services", "ray._private.services"),
        ("import torch as t\nt._dynamo.reset()", "torch._dynamo"),
        ("from uvicorn import Server\nServer._serve(1)", "uvicorn.Server._serve"),
        ("def f(server):\n    server._lifespan = 1", "…._lifespan"),
        ("getattr(server, '_lifespan')", "…._lifespan"),
        ("patch('ray.serve._private.proxy')", "ray.serve._private.proxy"),
    ],
)
def test_a_private_name_of_another_library_is_found(text: str, name: str, tmp_path: Path) -> None:
    assert code_of(tmp_path, a=text).private_names() == {("pack/a.py", name)}


def test_own_private_names_and_documented_names_are_not_reported(tmp_path: Path) -> None:
    own = "class A:\n    def _f(self): self._x = 1\ndef g(a): return a._f(), a._x, a.__dict__"
    documented = "import os, torch\nos._exit(1)\ntorch._foreach_add_(1, 2)\nrow._replace(a=1)"
    used = "from pack.a import A\nA()._f()"
    assert code_of(tmp_path, a=own, b=documented, c=used).private_names() == set()


def test_small_private_functions_with_one_caller_are_found(tmp_path: Path) -> None:
    text = "def _one(): ...\n_one()\ndef _two(): ...\n_two(), _two()\n"
    long = "def _long():\n" + "    x = 1\n" * 7 + "_long()\n"
    found = list(code_of(tmp_path, a=text + long).small_functions())
    assert found == [("pack/a.py:_one", 1)]


def test_a_module_with_one_importer_is_found_through_exports(tmp_path: Path) -> None:
    code = code_of(
        tmp_path,
        part__of____init__="from pack.part.b import B\nfrom pack.part.c import C",
        part__of__b="B = 1",
        part__of__c="C = 1",
        a="from pack.part import B, C",
        d="from pack.part import C",
    )
    assert ("pack/part/b.py", "pack/a.py") in set(code.single_importers())
    assert "pack/part/c.py" not in dict(code.single_importers())


def test_the_list_of_allowed_findings_can_only_shrink() -> None:
    assert len(ALLOWED.read_text(encoding="utf-8").splitlines()) <= NUM_ALLOWED
    allowed = "# comment\ncycle a.py\ncycle b.py\n"
    assert problems(allowed, ["cycle a.py", "cycle b.py"]) == []
    assert len(problems(allowed, ["cycle a.py", "cycle b.py", "private c.py x._y"])) == 1
    assert len(problems(allowed, ["cycle a.py"])) == 1
