"""Load, prediction, recordings, and what the results mean."""
