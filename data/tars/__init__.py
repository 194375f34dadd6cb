"""Reading tar files by their headers: tars written by kway and other tars, indexed or streamed."""
