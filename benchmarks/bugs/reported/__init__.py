"""Public reports of caches that are wrong, each rebuilt small."""
