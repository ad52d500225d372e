"""Plain values that enter and leave the batch layer: requests, parameters, KV groups, plans, block operations."""
