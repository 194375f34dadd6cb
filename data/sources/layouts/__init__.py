"""The on-disk layouts of published and common data sets: archives, class folders, taxonomies."""
