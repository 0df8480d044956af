"""Pure rules over a snapshot of a node's packages, files and model config."""
