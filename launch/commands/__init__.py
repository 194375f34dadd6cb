"""The commands of `kway`, one module each."""
