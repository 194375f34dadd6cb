"""All head benchmarks in one table: `python -m benchmarks.heads [SECTION ...]`.

Contenders take turns in each round. The table shows the median ratio over rounds next to its
target. For cover trees of word vectors and of a million classes, run
`python -m benchmarks.cover_tree`.
"""

from benchmarks import (
    cover_tree,
    factored,
    head_step,
    initial_rows,
    peak_memory,
    slc,
    smooth_topk,
)
from benchmarks.report import Sections, command_line, report

SECTIONS: Sections = {
    "trees": head_step.trees,
    "engine": head_step.engine,
    "frozen": head_step.frozen,
    "losses": head_step.losses,
    "sampled": head_step.sampled,
    "smooth_topk": smooth_topk.costs,
    "gradient_errors": smooth_topk.errors,
    "factored": factored.rows,
    "initial_rows": initial_rows.rows,
    "peak_memory": peak_memory.peaks,
    "cover_tree": cover_tree.rows,
    "slc": slc.rows,
}


if __name__ == "__main__":
    report(command_line("heads", __doc__).parse_args(), SECTIONS)
