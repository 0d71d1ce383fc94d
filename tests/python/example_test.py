"""The programs of tools/examples/python print what they say, and two pages show the first."""

import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "tools/examples/python"
PRINTED = {
    "attention.py": "(1, 512, 8, 64): o[0] = 0.100\nrow 99 sees 100 keys, row 100 sees 1\n",
    "document_mask.py": "63 of 256 blocks are computed\nas if it were alone: True\n",
    "latent_step.py": "prompts: (2, 50, 16, 512)\nstep: (2, 1, 16, 512), keys [70, 70], pages in use 4\n",
    "serving_step.py": "prompts: (2, 20, 8, 64)\nstep: (2, 1, 8, 64), keys [23, 23], pages in use 4\n",
    "two_processes.py": "zigzag: rank 0 has rows 0 to 127 and 384 to 511\nas one engine computes: True\n",
}
OF_TORCH = {"training_step.py"}  # torch_test.py runs them


class Examples(unittest.TestCase):
    def test_each_prints_what_is_expected(self):
        self.assertEqual({path.name for path in EXAMPLES.glob("*.py")}, set(PRINTED) | OF_TORCH)
        for name, printed in PRINTED.items():
            with self.subTest(example=name):
                done = subprocess.run(
                    [sys.executable, EXAMPLES / name], check=False, capture_output=True, text=True, timeout=60
                )
                self.assertEqual((done.stdout, done.stderr), (printed, ""))

    def shown(self, page):
        text = (ROOT / page).read_text()
        return text.split("<!-- tools/examples/python/attention.py;")[1].split("```python\n")[1].split("```")[0]

    def test_pages_show_the_first(self):
        program = (EXAMPLES / "attention.py").read_text()
        self.assertEqual(self.shown("tools/examples/README.md"), program)
        self.assertIn(self.shown("README.md"), program)


if __name__ == "__main__":
    unittest.main()
