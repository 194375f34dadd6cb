"""Speed and memory of the heads, as ratios: `python -m benchmarks.heads [SECTION ...]`.

Contenders take turns in each round. The table shows the median ratio over rounds next to its
target.
"""

from benchmarks import cover_tree, head_step, peak_memory, smooth_topk
from benchmarks.timing import Sections, command_line, report

SECTIONS: Sections = {
    "engine": head_step.engine,
    "trees": head_step.trees,
    "losses": head_step.losses,
    "smooth_topk": smooth_topk.rows,
    "peak_memory": peak_memory.rows,
    "cover_tree": cover_tree.rows,
}

if __name__ == "__main__":
    report(command_line("heads", __doc__).parse_args(), SECTIONS)
