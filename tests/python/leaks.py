"""Whether calls keep references or memory."""

import gc
import sys


def check_no_leaks(test, calls, watched, *, settling, rounds, repeats):
    """Calls `calls` `settling` times, until what is cached once is there, then `repeats` times `rounds` times. After
    that the objects of `watched` must have as many references as before. Each of the interpreter's blocks that one
    call keeps counts in all repeats, while its caches and the frameworks' grow less and less."""
    for _ in range(settling):
        calls()
    gc.collect()
    before, growth = [sys.getrefcount(one) for one in watched], []
    for _ in range(repeats):
        blocks = sys.getallocatedblocks()
        for _ in range(rounds):
            calls()
        gc.collect()
        growth.append(sys.getallocatedblocks() - blocks)
    test.assertEqual([sys.getrefcount(one) for one in watched], before)
    test.assertLess(min(growth), rounds, growth)
