"""flashjit.parallel of a process group of PyTorch's, with tensors of PyTorch, on CPUs."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

RANK = """
import sys, torch, flashjit
import torch.distributed as dist
from flashjit import parallel

rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=3)
of_two = dist.new_group([1, 2])
assert (parallel.of_torch().rank, parallel.of_torch().size) == (rank, 3)
if rank > 0:
    group = parallel.of_torch(of_two)
    assert (group.rank, group.size) == (rank - 1, 2)
    torch.manual_seed(0)
    x = torch.randn(1, 64, 2, 32, dtype=torch.bfloat16)
    engine = flashjit.Engine("cpu")
    with parallel.LayoutConversion(engine, group, "bf16", x.shape, "contiguous", "zigzag") as change:
        own = change.convert(x.chunk(2, 1)[group.rank].contiguous())
    spec = {"op": "forward", "dtype": "bf16", "head_dim": 32, "mask": ["causal"]}
    with parallel.ParallelAttention(engine, spec, group, seqlen_q=64, num_heads_q=2) as attention:
        o, lse = torch.empty_like(own), torch.empty(1, 2, 32)
        attention.forward(q=own, k=own, v=own, o=o, lse=lse, workspace=attention.workspace(own))
        places = parallel.sequence_chunks(attention.layout, 64, group.rank, 2)
    alone = flashjit.attention(x, x, x, mask="causal")
    right = torch.cat([alone[:, place] for place in places], 1)
    # Two roundings to bf16 apart, and those of weights.
    assert (o.float() - right.float()).abs().max() <= 3 * 2.0**-8 * x.float().abs().max(), (o - right).abs().max()
dist.barrier()
dist.destroy_process_group()
"""


class Torch(unittest.TestCase):
    def test_a_group_of_gloo(self):
        with tempfile.TemporaryDirectory() as folder:
            ranks = []
            for rank in range(3):
                command = [sys.executable, "-c", RANK, str(rank), str(Path(folder) / "meeting")]
                ranks.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
            said = [rank.communicate(timeout=120)[1] for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [0] * 3, said)


if __name__ == "__main__":
    unittest.main()
