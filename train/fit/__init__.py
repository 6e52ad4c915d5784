"""Training: from a feature cache to checkpoints."""
