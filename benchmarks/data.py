"""Speed and memory of data loading, as ratios: `python -m benchmarks.data [SECTION ...]`.

Contenders take turns in each round. The table shows the median ratio over rounds next to its
target. Without --images, the benchmarks use synthetic images as large as ImageNet's.
"""

from functools import partial
from pathlib import Path

from benchmarks import data_images, data_index, data_text
from benchmarks.timing import command_line, report

if __name__ == "__main__":
    parser = command_line("data", __doc__)
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="JPEG files to read")
    parser.add_argument("--texts", type=Path, metavar="SHARDS", help="text shards to read")
    options = parser.parse_args()
    sections = {
        "images": partial(data_images.rows, options.images),
        "small": data_images.small,
        "text": partial(data_text.rows, options.texts),
        "index": data_index.rows,
    }
    report(options, sections)
