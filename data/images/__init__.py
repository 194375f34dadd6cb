"""Decodes image bytes to pixels."""
