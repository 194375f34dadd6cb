"""`kway report`: a page that compares runs with plots and tables."""

from launch.report.page import report_page
from launch.report.reading import Run, read_runs

__all__ = ["Run", "read_runs", "report_page"]
