"""Our engine beside those of others."""
