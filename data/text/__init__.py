"""Texts: emoji found and removed, names and addresses hidden, records read, tokens made."""
