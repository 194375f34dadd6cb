"""The fixture of the tests that run `kway k8s render`."""

from collections.abc import Callable

import pytest


@pytest.fixture
def kway_render(kway: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Callable:
    """Run `kway k8s render` and return its exit code, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        return kway("k8s", "render", *arguments), *capsys.readouterr()

    return run
