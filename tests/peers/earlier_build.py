#!/usr/bin/env python3
"""Serves flashjit as a peer of compare.py, for any cell: another build, as of a kernel before a change, or the same one
without the fields that --fields adds, in turns in one job.

    FLASHJIT_EARLIER=/path/to/the/other/flashjit compare.py earlier_build.py --peers earlier --cells grid
    compare.py earlier_build.py --peers earlier --fields '{"batch_invariant": true}' --cells grid

compare.py has the protocol. A ratio above 1 means that the build under test, or the spec with the fields, is faster.
Without FLASHJIT_EARLIER the build is build/release/bin/flashjit.
"""
import json
import os
import sys

from compare import Process


def main():
    flashjit, processes = os.environ.get("FLASHJIT_EARLIER", "build/release/bin/flashjit"), {}
    for line in sys.stdin:
        request = json.loads(line)
        arguments = tuple(request["arguments"])
        if arguments not in processes:
            processes[arguments] = Process("the other flashjit", [flashjit, *arguments])
        row = {"section": "serve", "peer": request["peers"][0], "mode": request["modes"][0], "version": "earlier build", "ms": 0}
        for launch in request["requests"]:
            processes[arguments].ask(launch)
            answer = processes[arguments].answer()
            if "error" in answer:
                row["error"] = answer["error"]["message"]
            else:
                row["ms"] += answer["rows"][0]["ms"]
        print(json.dumps(row), flush=True)
    for process in processes.values():
        process.close()


if __name__ == "__main__":
    main()
