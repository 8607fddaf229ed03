"""The schedule under virtual time: the executor's own scheduler with drawn arrivals and execution times."""
