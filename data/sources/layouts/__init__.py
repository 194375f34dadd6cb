"""How published and common data sets are laid out on disk: archives, class folders, taxonomies."""
