"""Reading of tar files by their headers: kway's own and other tars, indexed or streamed."""
