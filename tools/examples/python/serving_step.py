# A serving step: new tokens go into a paged cache, then each sequence's new row attends to its keys.
import flashjit
import numpy as np

page_size, heads_q, heads_kv, head_dim = 16, 8, 2, 64
k = np.zeros((32, page_size, heads_kv, head_dim), np.float32)  # [num_pages, page_size, heads_kv, head_dim]
v = np.zeros_like(k)
page_table = np.array([[3, 7, 9], [1, 4, 0]], np.int32)  # [batch, max_pages]
random = np.random.default_rng(0)


def rows(tokens, heads):
    return random.normal(size=(2, tokens, heads, head_dim)).astype(np.float32)


# The prompts, of 20 tokens each; keys and queries are rotated by their positions.
lengths = np.array([20, 20], np.int32)
q = flashjit.append_kv(k, v, rows(20, heads_kv), rows(20, heads_kv), q=rows(20, heads_q), rotary=True,
                       append_positions=lengths - 20, page_table=page_table)  # fmt: skip
o = flashjit.attention(q, k, v, mask="causal", page_table=page_table, seqlens_k=lengths)
print(f"prompts: {o.shape}")

# Each step makes one token of each sequence. One launch appends and attends.
for _ in range(3):
    lengths += 1
    q = rows(1, heads_q)
    o = flashjit.decode(q, k, v, seqlens_k=lengths, page_table=page_table, k_new=rows(1, heads_kv),
                        v_new=rows(1, heads_kv), q_out=q, rotary=True)  # fmt: skip
print(f"step: {o.shape}, keys {lengths.tolist()}, pages in use {np.count_nonzero(k.any((1, 2, 3)))}")
