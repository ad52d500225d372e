"""Turn a plan into a checked batch, and write its samples back into the state."""
