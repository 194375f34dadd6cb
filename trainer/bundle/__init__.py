"""The bundle: an exported model, a folder with everything that serving needs."""
