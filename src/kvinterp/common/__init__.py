"""The basis of all rooms: files, the store, progress, text forms. Nothing here knows a model."""
