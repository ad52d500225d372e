"""Images of prompts without PyTorch: how they become tiles, and the encoder of these."""
