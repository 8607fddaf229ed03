"""What an executor consists of beside its hot path: rights, setting up, lanes, waiting, its supervisor's end."""
