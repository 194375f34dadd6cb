"""Train two heads on your own images, compare them, export the better one and query it.

python docs/tutorial.py [IMAGES] [--out FOLDER] [--epochs N]

IMAGES contains one folder of images per class. Without it, the script draws images of 12 classes.
"""

import argparse
import json
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

RECIPE = Path(__file__).parents[1] / "launch" / "recipes" / "images.yaml"
# Settings for a network small enough for a CPU. Without them, the recipe trains ResNet-18 on images
# of 128 x 128 pixels.
SMALL = (
    "backbone.config.hidden_sizes=[16, 32, 64, 128]",
    "backbone.config.depths=[1, 1, 1, 1]",
    "data.image={size: 48, resize: 54}",
)
# top-1 compares the logits of all classes; the other metrics use the logit of one class alone.
MEASURES = {"top1": "top-1", "auprc": "AUPRC", "precision_at_recall_0.9": "P@R 0.9"}


def kway(*arguments: object) -> None:
    words = list(map(str, arguments))
    print("\n$ kway", shlex.join(words), flush=True)
    subprocess.run([sys.executable, "-P", "-m", "launch", *words], check=True)


def draw_images(folder: Path, per_class: int = 40) -> None:
    """Draw images of one shape each, at a random position on a noise background.

    A class is a combination of color, shape and line width.
    """
    rng = np.random.default_rng(0)
    for color, shape, width in product(("red", "green"), ("ellipse", "rectangle"), (1, 2, 4)):
        target = folder / f"{color} {shape} {width}"
        target.mkdir(parents=True)
        for number in range(per_class):
            image = Image.fromarray(rng.integers(0, 160, (64, 64, 3), dtype=np.uint8))
            (x, y), size = rng.integers(4, 24, 2), rng.integers(16, 36)
            draw = getattr(ImageDraw.Draw(image), shape)
            draw((x, y, x + size, y + size), outline=color, width=width)
            image.save(target / f"{number}.png")


def measures_of(run: Path) -> dict[str, float]:
    newest = max((run / "evaluations").glob("step-*.json"))
    return json.loads(newest.read_text(encoding="utf-8"))


def main(images: Path | None, out: Path, epochs: float) -> None:
    if images is None:
        draw_images(images := out / "images")
    kway("shard", "imagefolder", images, "-o", out / "shards")  # holds out 10% of the images
    runs = {loss: out / "runs" / loss for loss in ("ce", "batch_ce")}
    for loss, run in runs.items():
        changes = (f"run={run}", f"data.shards={out / 'shards'}", f"head.loss.kind={loss}")
        kway("train", RECIPE, *SMALL, *changes, f"train.duration.epochs={epochs}")

    print(f"\n{'loss':10}", *(f"{name:>8}" for name in MEASURES.values()))
    for loss, run in runs.items():
        print(f"{loss:10}", *(f"{measures_of(run)[key]:8.1%}" for key in MEASURES))
    best = max(runs, key=lambda loss: measures_of(runs[loss])["auprc"])

    kway("export", runs[best], "-o", out / "bundle")
    image = min(path for path in images.rglob("*.*") if path.is_file())
    kway("query", out / "bundle", "--class", image.parent.name, "--recall", 0.9, image)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "images", nargs="?", type=Path, help="folder with one folder of images per class"
    )
    parser.add_argument("--out", type=Path, default=Path("tutorial"), help="new output folder")
    parser.add_argument("--epochs", type=float, default=5)
    main(**vars(parser.parse_args()))
