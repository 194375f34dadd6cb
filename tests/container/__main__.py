"""Build the images of the Dockerfile without a container engine, then test them.

Requires root, debootstrap and iproute2. Takes about ten minutes and 6 GB in --work.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.container.build import BuildEnvironment, Builder
from tests.container.context import read_context
from tests.container.dockerfile import read_dockerfile
from tests.container.layers import Mount, megabytes
from tests.container.use import check

_ROOT = Path(__file__).parents[2]


def _pair(separator: str) -> Callable[[str], tuple[str, str]]:
    def parse(text: str) -> tuple[str, str]:
        first, found, second = text.partition(separator)
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} does not contain {separator!r}")
        return first, second

    return parse


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.container", description=__doc__)
    parser.add_argument("--build-arg", type=_pair("="), action="append", default=[])
    parser.add_argument("--work", type=Path, default=_ROOT / "build/container")
    parser.add_argument("--no-check", action="store_true", help="build only")
    parser.add_argument(
        "--env",
        type=_pair("="),
        action="append",
        default=[],
        help="variable for RUN only, as NAME=VALUE, for example a mirror",
    )
    parser.add_argument(
        "--mount", type=_pair(":"), action="append", default=[], help="FROM:TO, only for RUN"
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    options = _options(words)
    text = (_ROOT / "Dockerfile").read_text(encoding="utf-8")
    dockerfile = read_dockerfile(text, dict(options.build_arg))
    mounts = tuple(Mount(Path(source).resolve(), target) for source, target in options.mount)
    work = options.work.resolve()
    (work / "layers").mkdir(parents=True, exist_ok=True)
    build_environment = BuildEnvironment(dict(options.env), mounts)
    builder = Builder(dockerfile, read_context(_ROOT), build_environment, work)
    images = {target: builder.build(target) for target in ("kway", "serve")}
    print("\n== layers of kway")
    for layer in images["kway"].layers:
        print(f"{megabytes(layer):8,.0f} MB  {layer.relative_to(work)}")
    print(f"{sum(map(megabytes, images['kway'].layers)):8,.0f} MB  total")
    if not options.no_check:
        check(images["kway"], images["serve"], work / "used", _ROOT)


if __name__ == "__main__":
    main()
