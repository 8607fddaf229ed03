"""What schedulers saw and decided: kept, replayed, told in words, drawn."""
