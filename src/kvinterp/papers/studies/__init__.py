"""One file a study: a question of the literature, asked of many prompts."""
