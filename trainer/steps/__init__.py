"""What a training step needs besides model and optimizer."""
