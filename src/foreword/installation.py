"""The words with which every message says how to install an extra: no package index has Foreword."""


def install(extra: str) -> str:
    """Return the sentence that says how to install an extra of pyproject.toml, such as "serve"."""
    return (
        f"Install foreword[{extra}]: `pip install '.[{extra}]'` in a checkout of Foreword, or `pip install "
        f"'WHEEL[{extra}]'` with the path of its wheel."
    )
