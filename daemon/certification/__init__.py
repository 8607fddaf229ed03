"""From measured times to what each device may promise, and whether it holds."""
