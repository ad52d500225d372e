"""From a plan to a checked batch, and from its samples back to the state."""
