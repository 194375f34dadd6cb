"""All data-loading benchmarks in one table: `python -m benchmarks.data [SECTION ...]`.

Ratios are medians over rounds in which the contenders take turns, shown with their targets.
Comparisons on the same files come first. Without a folder of real images, synthetic images of
ImageNet's size are used.
"""

from functools import partial
from pathlib import Path

from benchmarks import data_images, data_index, data_text
from benchmarks.report import command_line, report


def main() -> None:
    parser = command_line("data", __doc__)
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="JPEG files to read")
    parser.add_argument("--texts", type=Path, metavar="SHARDS", help="text shards to read")
    options = parser.parse_args()
    sections = {
        "images": partial(data_images.rows, options.images),
        "text": partial(data_text.rows, options.texts),
        "index": data_index.rows,
    }
    report(options, sections)


if __name__ == "__main__":
    main()
