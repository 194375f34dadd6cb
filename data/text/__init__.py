"""Text processing: emoji, masking of user names and URLs, and tokenization."""
