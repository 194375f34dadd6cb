"""Text processing: emoji, masking of user names and URLs, record files, and tokenization."""
