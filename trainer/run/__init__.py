"""The folder of a run, its provenance, and how it is resumed and continued."""
