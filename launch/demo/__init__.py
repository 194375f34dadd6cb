"""The demo: runs the complete workflow of kway on generated images."""
