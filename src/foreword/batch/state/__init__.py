"""The state that the batch layer keeps between two steps: one permanent row per request, its blocks and its
parameters.
"""
