"""docs/api.md lists every error code."""

import ast
import re
from collections.abc import Iterator

from tests.system.processes import ROOT

# The position of the code among the arguments. For a limit, the code is `too_many_` followed by its
# name.
CODES = {"ApiError": 1, "error_response": 1, "ErrorDetail": 0, "invalid": 0, "ClientLimit": 1}


def codes_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if (position := CODES.get(node.func.id)) is None:
            continue
        keywords = [word.value for word in node.keywords if word.arg == "code"]
        for one in keywords or node.args[position : position + 1]:
            if isinstance(one, ast.Constant):
                is_limit = node.func.id == "ClientLimit"
                yield f"too_many_{one.value}".replace(" ", "_") if is_limit else one.value


def test_every_error_code_is_documented() -> None:
    sources = (path.read_text() for path in (ROOT / "serving").rglob("*.py"))
    found = {code for source in sources for code in codes_in(ast.parse(source))}
    assert len(found) > 40
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs/api.md").read_text()))
    assert found - documented == set()
