"""What the scheduler is made of, and the analysis that admission rests on. No clock, no I/O."""
