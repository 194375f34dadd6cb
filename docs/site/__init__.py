"""MkDocs hooks: pages that the site takes from outside docs/. `mkdocs.yml` lists them."""
