"""Training: data, metrics, states and the loop."""
