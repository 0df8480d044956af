"""surgeon changes the sglang that is installed on a GPU node, proves that it runs, and can put every byte back."""

__version__ = "0.1.0"
