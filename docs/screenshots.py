"""Takes the screenshots of the docs: `python -m docs.screenshots DEMO [--only report] [--out DIR]`.

DEMO is the output folder of `kway demo`. This process serves its bundle and sends queries with
held-out images. The report and README's figure compare its runs. The browser is the Chromium
installed on the machine.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from playwright.sync_api import Page, expect

from data.shards.label_vectors import load_label_vectors
from data.shards.manifest import Manifest
from data.shards.split import open_split
from docs import demo_plots
from launch.commands.demo import RUNS
from tests.serving.browsing import chromium, until, visit
from tests.serving.in_process import application, listening
from trainer.world import open_world

KWAY = (sys.executable, "-P", "-m", "launch")
CLASS = "LATIN SMALL LETTER E"
_GALLERY_SIZE = 3000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.screenshots", description=__doc__)
    parser.add_argument("demo", type=Path, metavar="DEMO", help="output folder of `kway demo`")
    parser.add_argument(
        "--only", choices=("page", "report"), help="screenshots to take; default: both"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="output folder")
    arguments = parser.parse_args()
    if not (arguments.demo / "bundle").is_dir():
        parser.exit(
            2, f"error: {arguments.demo} has no bundle: run kway demo -o {arguments.demo}\n"
        )
    with TemporaryDirectory() as folder:
        if arguments.only is None:
            with open_world("cpu") as world:
                demo_plots.draw(arguments.demo, world, arguments.out / "demo.png")
        if arguments.only != "page":
            print_size(shoot_report(arguments.demo, Path(folder), arguments.out))
        if arguments.only != "report":
            for path in shoot_page(arguments.demo, Path(folder), arguments.out):
                print_size(path)


def print_size(path: Path) -> None:
    print(path, f"{path.stat().st_size / 1000:.0f} kB", flush=True)


def shoot_report(demo: Path, folder: Path, out: Path) -> Path:
    """The first sections of the report that compares the demo's runs."""
    report = folder / "report.html"
    runs = [run.folder(demo) for run in RUNS]
    subprocess.run([*KWAY, "report", *runs, "-o", report], check=True)
    size = {"viewport": {"width": 1300, "height": 1175}}
    with chromium() as browser, visit(browser, report.as_uri(), is_started=False, **size) as page:
        path = out / "report.png"
        page.screenshot(path=path)
        return path


def shoot_page(demo: Path, folder: Path, out: Path) -> Iterator[Path]:
    """The web page, while it is queried for held-out images."""
    images, gallery = folder / "images", folder / "gallery"
    queried = write_images(demo / "shards", images)
    bundle = demo / "bundle"
    subprocess.run([*KWAY, "index", bundle, images, "-o", gallery], check=True)
    with listening(application(bundle, galleries={"held-out": str(gallery)})) as url:
        yield from take(url, queried, out)


def write_images(shards: Path, folder: Path) -> list[Path]:
    """Write held-out images to `folder`, named by their classes. Returns those to query: images of
    CLASS, of the classes with the most similar names, and of a less similar class."""
    folder.mkdir()
    written: dict[int, list[Path]] = {}
    vectors = load_label_vectors(shards, Manifest.load(shards))
    with open_split(shards, "test") as split:
        names = [info.name for info in split.classes]
        wanted = names.index(CLASS)
        for index in range(min(len(split), _GALLERY_SIZE)):
            content, extension, label = split.read(index)
            name = f"{names[label]} {len(written.get(label, ())) + 1}.{extension}"
            written.setdefault(label, []).append(folder / name)
            (folder / name).write_bytes(content)
    by_similarity = np.argsort(-(vectors @ vectors[wanted]))
    others = [label for label in by_similarity if int(label) in written and label != wanted]
    selected = [*others[:4], others[40]]
    return [*written[wanted][:3], *(written[int(label)][0] for label in selected)]


def take(url: str, images: list[Path], out: Path) -> Iterator[Path]:
    """Take the screenshots and yield their paths."""
    phone = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2}
    looks = {"light": {}, "dark": {"color_scheme": "dark"}, "phone": phone}
    with chromium() as browser:
        for look, options in looks.items():
            settings = {"reduced_motion": "reduce", "device_scale_factor": 1.5, **options}
            with visit(browser, url, **settings) as page:
                query(page, images)
                yield shot(page, out / f"page-{look}.png")
                if look == "light":
                    search(page)
                    yield shot(page, out / "page-gallery.png")


def query(page: Page, images: list[Path]) -> None:
    page.locator("#class-input").fill(CLASS)
    page.locator("#class-input").press("Enter")
    expect(page.locator(".chip")).to_have_count(1)
    page.locator("#choose input").set_input_files(images)
    expect(page.locator(".verdict")).to_have_count(len(images))
    page.locator("#class-input").blur()


def search(page: Page) -> None:
    page.get_by_role("tab", name="Gallery").click()
    expect(page.locator(".hit").first).to_be_visible()
    while not page.locator(".boundary").count():
        page.locator(".ranking .button").click()
        expect(page.locator(".ranking .button")).to_be_enabled()
    until(
        page,
        "document.querySelectorAll('.hit').length === document.querySelectorAll('.hit img').length",
    )


def shot(page: Page, path: Path) -> Path:
    """Take a screenshot of the whole page, at most two windows high."""
    height = page.evaluate("Math.min(document.documentElement.scrollHeight, 2 * innerHeight)")
    width = page.evaluate("innerWidth")
    page.mouse.move(0, 0)
    clip = {"x": 0, "y": 0, "width": width, "height": height}
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=path, full_page=True, clip=clip)  # type: ignore[arg-type]
    return path


if __name__ == "__main__":
    main()
