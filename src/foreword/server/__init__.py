"""An HTTP server over an engine: the interfaces that existing clients use.

`foreword.server.run` serves a model in a process, `foreword.server.app` makes an ASGI application of any engine.
"""
