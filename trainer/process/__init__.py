"""The process of a rank: signals, output, errors and exit codes."""
