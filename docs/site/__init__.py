"""MkDocs hooks that add pages from outside docs/ to the site. `mkdocs.yml` lists the hooks."""
