"""The `kway` command, the recipes it ships, and how it starts processes."""
