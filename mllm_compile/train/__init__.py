"""A runtime's trainable side: its own log-probabilities, with gradients."""
