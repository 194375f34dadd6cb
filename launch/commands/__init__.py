"""One module a command of `kway`."""
