"""What operators see: status, statistics, metrics, events."""
