"""The same three trainings, a file for each library."""
