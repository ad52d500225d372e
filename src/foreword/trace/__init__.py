"""Recorded steps of an engine as one file, a trace: its format, reader, writer, replay and shrinker.

The format is that of docs/conformance.md, for any engine. `foreword.insight` exports the public names.
"""
