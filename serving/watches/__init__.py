"""Standing queries: questions that stay, asked of every frame of the feeds they look at."""
