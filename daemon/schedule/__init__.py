"""The scheduler's parts, the analysis behind admission, the schedule under virtual time. No clock, no I/O."""
