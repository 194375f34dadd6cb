"""Text processing: finds and removes emoji, masks user names and URLs, reads records, tokenizes."""
