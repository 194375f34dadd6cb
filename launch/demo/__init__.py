"""The demo: the whole of kway on pictures that it makes itself."""
