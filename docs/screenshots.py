"""Takes the images of the page: `python -m docs.screenshots DEMO [--out DIR]`.

DEMO is the folder of `kway demo`: its model answers, its held-out images are asked about. The
application runs in this process, the browser is the machine's Chromium.
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
from tests.serving.browsing import chromium, until, visit
from tests.serving.in_process import application, listening

CLASS = "LATIN SMALL LETTER E"
_GALLERY_SIZE = 3000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.screenshots", description=__doc__)
    parser.add_argument("demo", type=Path, metavar="DEMO", help="folder of `kway demo`")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder")
    arguments = parser.parse_args()
    if not (arguments.demo / "bundle").is_dir():
        parser.exit(
            2, f"error: {arguments.demo} has no bundle: run kway demo -o {arguments.demo}\n"
        )
    with TemporaryDirectory() as folder:
        images, gallery = Path(folder) / "images", Path(folder) / "gallery"
        asked = write_images(arguments.demo / "shards", images)
        bundle = arguments.demo / "bundle"
        command = [sys.executable, "-P", "-m", "launch", "index", bundle, images, "-o", gallery]
        subprocess.run(command, check=True)
        with listening(application(bundle, galleries={"held-out": str(gallery)})) as url:
            for path in take(url, asked, arguments.out):
                print(path, f"{path.stat().st_size / 1000:.0f} kB", flush=True)


def write_images(shards: Path, folder: Path) -> list[Path]:
    """Held-out images, named by what they show -> `folder`; some to ask about: of the class, of
    the classes most like it, and of any."""
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
    alike = np.argsort(-(vectors @ vectors[wanted]))
    near = [label for label in alike if int(label) in written and label != wanted]
    some = [*near[:4], near[40]]
    return [*written[wanted][:3], *(written[int(label)][0] for label in some)]


def take(url: str, asked: list[Path], out: Path) -> Iterator[Path]:
    """The images, one after the other, each as soon as it is there."""
    phone = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2}
    looks = {"light": {}, "dark": {"color_scheme": "dark"}, "phone": phone}
    with chromium() as browser:
        for look, options in looks.items():
            settings = {"reduced_motion": "reduce", "device_scale_factor": 1.5, **options}
            with visit(browser, url, **settings) as page:
                ask(page, asked)
                yield shot(page, out / f"page-{look}.png")
                if look == "light":
                    search(page)
                    yield shot(page, out / "page-gallery.png")
                    watch(page, asked)
                    yield shot(page, out / "page-watch.png")


def ask(page: Page, asked: list[Path]) -> None:
    page.locator("#class-input").fill(CLASS)
    page.locator("#class-input").press("Enter")
    expect(page.locator(".chip")).to_have_count(1)
    page.locator("#choose input").set_input_files(asked)
    expect(page.locator(".verdict")).to_have_count(len(asked))
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


def watch(page: Page, asked: list[Path]) -> None:
    page.get_by_role("tab", name="Live watch").click()
    page.get_by_role("button", name="Watch for these classes").click()
    expect(page.locator(".watch").get_by_role("status")).to_have_text("listening")
    page.locator("#panel-watch input[type=file]").set_input_files(asked)
    expect(page.locator("#panel-watch")).to_contain_text(f"{len(asked)} frames processed")
    until(page, "[...document.querySelectorAll('.log-entry img')].every((one) => one.naturalWidth)")


def shot(page: Page, path: Path) -> Path:
    """All of the page, and not its window alone, but no more than two windows high."""
    height = page.evaluate("Math.min(document.documentElement.scrollHeight, 2 * innerHeight)")
    width = page.evaluate("innerWidth")
    page.mouse.move(0, 0)
    clip = {"x": 0, "y": 0, "width": width, "height": height}
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=path, full_page=True, clip=clip)  # type: ignore[arg-type]
    return path


if __name__ == "__main__":
    main()
