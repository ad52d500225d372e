"""The plugin of SGLang's entry point ``sglang.srt.plugins``: it starts the check of steps where that is asked for."""

from __future__ import annotations

from foreword.check_options import CheckOptions


def plugin() -> None:
    """Follow the scheduler of this process as FOREWORD_CHECK says. Without the variable, or for "off": do nothing.

    Raise ConfigError for a value that FOREWORD_CHECK cannot have.
    """
    options = CheckOptions.of_environment()
    if options is not None:
        from foreword.shadow.sglang import register  # it imports NumPy

        register(options)
