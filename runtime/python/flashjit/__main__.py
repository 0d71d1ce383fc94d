"""python -m flashjit is the command flashjit."""

import os
import sys
from pathlib import Path


def main():
    here = Path(__file__).parent
    command = here / "flashjit-command"
    if not command.exists():  # in a build tree
        from . import _native

        command = Path(_native.__file__).resolve().parents[2] / "bin" / "flashjit"
    os.execv(command, ["flashjit", *sys.argv[1:]])


if __name__ == "__main__":
    main()
