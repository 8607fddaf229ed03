"""What the gateway consists of: its listeners, and lanes shared by many requests."""
