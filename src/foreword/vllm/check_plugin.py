"""The entry point of vLLM's plugins that starts the check of its steps where FOREWORD_CHECK asks for it."""

from __future__ import annotations

from foreword.check_options import CheckOptions


def plugin() -> None:
    """Follow the model runner of every worker that this process starts. Without the variable: do nothing.

    Raise ConfigError for an invalid value of FOREWORD_CHECK.
    """
    options = CheckOptions.of_environment()
    if options is not None:
        from foreword.vllm.attach import watch_workers  # it imports vLLM's workers

        watch_workers(options)
