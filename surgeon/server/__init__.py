"""The serving process: how it was started, whether it is ready, what its log says."""
