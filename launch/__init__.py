"""The `kway` command, the recipes that ship with it, and the code that starts processes."""
