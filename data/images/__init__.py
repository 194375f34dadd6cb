"""Bytes of pictures to pixels."""
