"""The stories that a command tells, each from survey to outcome."""
