"""`python -m foreword`: the `foreword` command."""

from foreword.cli import main

if __name__ == "__main__":
    main()
