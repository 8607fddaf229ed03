"""One executor, or one supervisor, going on where another one stopped."""
