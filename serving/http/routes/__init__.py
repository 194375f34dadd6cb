"""The routes of the HTTP API, one module per resource; `serving/app.py` lists them."""
