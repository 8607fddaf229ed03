"""A model's next version on copies of the jobs that loops do: compared, never used."""
