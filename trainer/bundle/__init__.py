"""The bundle: the exported model, a folder with all that serving needs."""
