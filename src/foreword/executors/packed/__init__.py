"""Packed weights, kept in files that processes map and share: format, folder, and the parts of a native model.

See docs/decisions/0026-packed-weights-in-mapped-files.md.
"""
