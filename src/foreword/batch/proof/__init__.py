"""Validation of batches, and the proof that a cache is used correctly."""
