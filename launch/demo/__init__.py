"""The demo: runs all of kway on generated images."""
