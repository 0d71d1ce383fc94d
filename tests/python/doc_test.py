"""The examples in docstrings, and the stubs' names."""

import doctest
import unittest

import flashjit
from flashjit import _engine, _functions, _views, parallel


def load_tests(loader, tests, pattern):
    for module in (flashjit, _engine, _functions, _views, parallel):
        tests.addTests(doctest.DocTestSuite(module))
    return tests


class Names(unittest.TestCase):
    def test_everything_public_is_documented(self):
        for name in flashjit.__all__:
            if name != "version":
                self.assertTrue(getattr(flashjit, name).__doc__, name)
        for name in parallel.__all__:
            self.assertTrue(getattr(parallel, name).__doc__, name)


if __name__ == "__main__":
    unittest.main()
