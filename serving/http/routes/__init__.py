"""The routes of the HTTP API, one module per resource; `serving/http/app.py` lists them."""
