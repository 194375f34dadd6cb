"""Reads tar files by their headers, to index or stream tars from kway or from other tools."""
