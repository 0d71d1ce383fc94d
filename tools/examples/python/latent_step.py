# A serving step of DeepSeek-V3's attention: a token has one row of 512 latent and 64 rotary columns, which is key and
# value of all heads.
import flashjit
import numpy as np

page_size, heads, columns, latent = 64, 16, 576, 512
cache = np.zeros((6, page_size, 1, columns), np.float32)  # [num_pages, page_size, 1, columns]
page_table = np.array([[3, 5], [1, 4]], np.int32)  # [batch, max_pages]
rotary = {"style": "interleaved", "first": latent}
scale = 192**-0.5  # of the 128 + 64 columns that a head has in the model
random = np.random.default_rng(0)


def rows(tokens, heads):
    return random.normal(size=(2, tokens, heads, columns)).astype(np.float32)


# The prompts, of 50 tokens each. There is no v: it is the first columns of the cache.
lengths = np.array([50, 50], np.int32)
q = flashjit.append_kv(cache, None, rows(50, 1), head_dim_v=latent, q=rows(50, heads), rotary=rotary,
                       append_positions=lengths - 50, page_table=page_table)  # fmt: skip
o = flashjit.attention(q, cache, head_dim_v=latent, scale=scale, mask="causal", page_table=page_table,
                       seqlens_k=lengths)  # fmt: skip
print(f"prompts: {o.shape}")

# Each step makes one token of each sequence. One launch appends and attends.
for _ in range(20):
    lengths += 1
    q = rows(1, heads)
    o = flashjit.decode(q, cache, head_dim_v=latent, scale=scale, seqlens_k=lengths, page_table=page_table,
                        k_new=rows(1, 1), q_out=q, rotary=rotary)  # fmt: skip
print(f"step: {o.shape}, keys {lengths.tolist()}, pages in use {np.count_nonzero(cache.any((1, 2, 3)))}")
