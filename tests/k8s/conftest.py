"""The command whose output the tests of this folder check."""

from collections.abc import Callable

import pytest

Render = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kway_render(kway: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Render:
    """Run `kway k8s render` and return its exit code, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = kway("k8s", "render", *arguments)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run
