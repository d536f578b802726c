"""What every room stands on and no room owns: files, the store, progress, text forms. It knows no model."""
