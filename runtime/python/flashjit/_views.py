"""What a notebook shows: the picture of a mask, the report of a tuning. The command makes both."""

import json
import subprocess
import tempfile
from pathlib import Path

from .__main__ import command
from ._engine import Spec
from ._errors import BY_STATUS, InternalError, InvalidArgumentError

_BY_CODE = {kind.code: kind for kind in BY_STATUS} | {"usage": InvalidArgumentError}


class Picture:
    """Which tiles of the score matrix a mask keeps. svg is the picture, facts are the numbers beside it."""

    def __init__(self, svg, facts):
        self.svg, self.facts = svg, facts

    def _repr_svg_(self):
        return self.svg


class Report:
    """What a tuning found. html is a page with charts, facts are its numbers."""

    def __init__(self, html, facts):
        self.html, self.facts = html, facts

    def _repr_html_(self):
        return self.html


def draw_mask(spec, **options):
    """The Picture of a spec's mask (a Spec, JSON text or a dict), which a notebook shows.

    Options are those of `python -m flashjit mask --help` with underscores: seqlen_q=2048, window_left=500, head=3.

    >>> import flashjit
    >>> spec = {"op": "forward", "dtype": "fp32", "head_dim": 64, "mask": ["causal"]}
    >>> picture = flashjit.draw_mask(spec, seqlen_q=64, tile_m=16, tile_n=16)
    >>> picture.svg.startswith("<svg")
    True
    """
    return Picture(*_made("mask", "--svg", spec, options))


def tune(spec, **options):
    """Finds the fastest configs for a spec or a manifest, and records them in the cache folder.

    Options are those of `python -m flashjit tune --help` with underscores: device="cuda:0", budget="5m",
    seqlens="1024,4096". Ctrl-C keeps what was measured. Returns the Report, which a notebook shows.
    """
    return Report(*_made("tune", "--report", spec, options))


def _made(verb, option, spec, options):
    text = spec if isinstance(spec, str) else spec.json if isinstance(spec, Spec) else json.dumps(spec)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "made.html"
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not True]
        words += [f"--{name.replace('_', '-')}" for name, value in options.items() if value is True]
        done = subprocess.run(
            [command(), verb, text, option, file, "--json", *words], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            try:
                error = json.loads(done.stderr)["error"]
            except ValueError:
                ended = f"the command ended with {done.returncode}"
                error = {"code": "internal", "message": ended, "detail": done.stderr}
            raise _BY_CODE.get(error["code"], InternalError)(error["message"], error["detail"])
        return file.read_text(), json.loads(done.stdout)
