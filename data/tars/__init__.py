"""Tar files by their headers: those that kway wrote, and those of others, indexed or streamed."""
