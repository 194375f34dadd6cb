"""The bundle: an exported model in a folder that contains everything required for serving."""
