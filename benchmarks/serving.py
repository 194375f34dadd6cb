"""Cost of serving: `python -m benchmarks.serving [SECTION ...]`."""

from benchmarks import (
    gallery_search,
    serving_compared,
    serving_processes,
    serving_requests,
    serving_rows,
)
from benchmarks.report import Sections, command_line, report

SECTIONS: Sections = {
    "heads": serving_rows.heads,
    "query": serving_rows.whole_query,
    "start": serving_rows.start,
    "gallery": gallery_search.rows,
    "requests": serving_requests.requests,
    "batches": serving_requests.batches,
    "peers": serving_compared.peers,
    "processes": serving_processes.processes,
}


if __name__ == "__main__":
    report(command_line("serving", __doc__).parse_args(), SECTIONS)
