"""The routes of the HTTP API, one module a resource; `serving/http/app.py` lists them."""
