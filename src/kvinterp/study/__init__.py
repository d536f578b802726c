"""The studies: what is asked of many prompts with the core's means, what came out of it, and the pages that show it."""
