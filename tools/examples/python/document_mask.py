# Packed documents: a row sees earlier keys of its own document, and blocks that no document reaches are skipped.
import flashjit
import numpy as np

lengths = [300, 900, 100, 748]
document = np.repeat(np.arange(4, dtype=np.int32), lengths)[None]  # [batch, seqlen]
x = np.random.default_rng(0).normal(size=(1, 2048, 8, 64)).astype(np.float32)

mask = {
    "mask": ["causal", "document[key] == document[position]"],
    "tables": {"document": ["batch", "seqlen_k"]},
    "document": document,
}
lists = flashjit.make_block_lists(x, x, bitmasks=64, **mask)  # once for all layers
o = flashjit.attention(x, x, x, block_lists=lists, **mask)

listed = lists.block_offsets[0, 0, -1]
print(f"{listed} of {16 * 16} blocks are computed")
alone = flashjit.attention(x[:, 300:1200], x[:, 300:1200], x[:, 300:1200], mask="causal")
print("as if it were alone:", np.allclose(o[:, 300:1200], alone, atol=1e-5))
