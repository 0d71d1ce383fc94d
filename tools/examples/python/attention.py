# Causal attention of NumPy arrays on this machine's CPU. Tensors of PyTorch or CuPy on a GPU go the same way.
import flashjit
import numpy as np

q = np.full((1, 512, 8, 64), 0.1, np.float32)  # [batch, seqlen, heads, head_dim]
k = v = q
o = flashjit.attention(q, k, v, mask="causal")
print(f"{o.shape}: o[0] = {o[0, 0, 0, 0]:.3f}")

# A formula as a mask: rows see the keys of their own document. The tables that it reads are given by name.
document = (np.arange(512, dtype=np.int32) // 100)[None]
o, lse = flashjit.attention(
    q,
    k,
    v,
    mask=["causal", "document[key] == document[position]"],
    document=document,
    tables={"document": ["batch", "seqlen_k"]},
    return_lse=True,
)
print(f"row 99 sees {np.exp(lse[0, 0, 99] - 0.08):.0f} keys, row 100 sees {np.exp(lse[0, 0, 100] - 0.08):.0f}")
