"""Waits in tests have a limit.

pytest-timeout would end them too, but only after minutes, and its message does not name the cause.
"""

import ast
from collections.abc import Iterator

from tests.system.processes import ROOT

_OF_SUBPROCESS = {"run", "call", "check_call", "check_output"}
# Without an argument, these wait forever: processes, threads, futures, events, barriers and locks.
_WAITS = {"wait", "join", "communicate", "result", "exception", "acquire"}


def endless_waits(source: str) -> Iterator[int]:
    """Yield the lines that wait without a limit. Waits of asyncio are limited by their callers."""
    tree = ast.parse(source)
    awaited = {node.value for node in ast.walk(tree) if isinstance(node, ast.Await)}
    for call in ast.walk(tree):
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Name("subprocess"), attr=name)):
                names = {keyword.arg for keyword in call.keywords}
                if name in _OF_SUBPROCESS and not names & {"timeout", None}:
                    yield call.lineno
            case ast.Call(func=ast.Attribute(attr=name), args=[], keywords=[]):
                if name in _WAITS and call not in awaited:
                    yield call.lineno


def test_a_wait_without_a_limit_is_found():
    lines = ["subprocess.run(['ls'])", "thread.join()", "process.wait(timeout=1)", "' '.join(x)"]
    lines += ["async def f(): await event.wait()", "subprocess.run(['ls'], timeout=1)"]
    assert list(endless_waits("\n".join(lines))) == [1, 2]


def test_every_wait_in_the_tests_has_a_limit():
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in endless_waits(path.read_text(encoding="utf-8"))
    ]
    assert found == []
