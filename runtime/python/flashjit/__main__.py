"""python -m flashjit is the command flashjit."""

import os
import sys
from pathlib import Path


def command():
    """The path of the command."""
    installed = Path(__file__).parent / "flashjit-command"
    if installed.exists():
        return installed
    from . import _native  # in a build tree

    return Path(_native.__file__).resolve().parents[2] / "bin" / "flashjit"


def main():
    os.execv(command(), ["flashjit", *sys.argv[1:]])


if __name__ == "__main__":
    main()
