#!/usr/bin/env python3
"""Serves another build of flashjit as a peer of compare.py, for full and causal cells: a change of a kernel beside the
kernel before it, in turns in one job.

    FLASHJIT_EARLIER=/path/to/the/other/flashjit compare.py earlier_build.py --peers earlier --cells grid

compare.py has the protocol. A ratio above 1 means that the build under test is faster than the earlier one.
"""
import json
import os
import subprocess
import sys


def spec_of(request):
    return {"op": {"fwd": "forward", "bwd": "backward"}[request["modes"][0]], "dtype": "bf16", "head_dim": request["d"],
            "head_dim_v": request["dv"], "mask": ["causal"] if request["causal"] else [], "lse": True, "dropout": False}


def main():
    command = [os.environ["FLASHJIT_EARLIER"], "bench", "--serve", "--device", "cuda:0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for line in sys.stdin:
            request = json.loads(line)
            shape = {"batch": request["b"], "seqlen_q": request["s"], "seqlen_k": request.get("sk", request["s"]), "num_heads_q": request["hq"], "num_heads_kv": request["hk"]}
            print(json.dumps({"spec": spec_of(request), "rounds": 40, "shapes": [shape]}), file=process.stdin, flush=True)
            answer = json.loads(process.stdout.readline())
            row = {"section": "serve", "peer": request["peers"][0], "mode": request["modes"][0], "version": "earlier build"}
            row |= {"error": answer["error"]["message"]} if "error" in answer else {"ms": answer["rows"][0]["ms"]}
            print(json.dumps(row), flush=True)
        process.stdin.close()


if __name__ == "__main__":
    main()
