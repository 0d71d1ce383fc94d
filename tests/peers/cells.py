"""The problems that compare.py measures, as classes whose names are cells: a forward or a backward (Cell), a decode (Decode),
a formula (Formula), attention within documents (Documents), append_kv (Append); and the sets of cells by name.

A cell gives the request to a peer, the request and the spec to flashjit, and what a rate counts: operations or bytes.
"""
import array
import struct

MASKS = {  # a spec's masks; the last three only on a CPU: PyTorch has no flag for them
    "full": [],
    "causal": ["causal"],
    "padding": ["padding"],
    "window": ["sliding_window"],
    "blocks": [{"kind": "block_sparse", "block_m": 128, "block_n": 128}],
}


def grid(dims, seqlens):
    return [f"{dim}:{seqlen}:{mask}" for dim in dims for mask in ("full", "causal") for seqlen in seqlens]


# Shapes of public models: heads, head_dim, lengths and patches of their model cards. Shares are those of a GPU of so many
# in tensor parallelism. No shape is taken off because of a figure.
TRAINED = {
    "Llama 3 8B, a sequence of 8,192": "128:8192:causal:32/8:b1",
    "Llama 3 8B, four of 2,048": "128:2048:causal:32/8:b4",
    "Llama 3 8B, a sequence of 2,048": "128:2048:causal:32/8:b1",
    "Llama 3 70B": "128:4096:causal:64/8:b1",
    "Llama 3 70B, a GPU's share of 8": "128:8192:causal:8/1:b1",
    "Llama 3.2 1B": "64:4096:causal:32/8:b2",
    "Qwen 2.5 7B": "128:4096:causal:28/4:b1",
    "Qwen 2.5 0.5B": "64:2048:causal:14/2:b4",
    "Qwen 3 30B-A3B": "128:4096:causal:32/4:b1",
    "Qwen 3 32B, a GPU's share of 4": "128:2048:causal:16/2:b1",
    "Gemma 2 9B": "256:4096:causal:16/8:b1",
    "Gemma 3 4B": "256:2048:causal:8/4:b2",
    "Phi 3 mini": "96:4096:causal:32/32:b1",
    "GPT-2 XL": "64:1024:causal:25/25:b8",
    "gpt-oss 20B, full layers": "64:4096:causal:64/8:b1",
    "SmolLM2 135M": "64:2048:causal:9/3:b16",
    "OLMo 2 13B": "128:4096:causal:40/40:b1",
    "DeepSeek V2 Lite": "192/128:4096:causal:16/16:b1",
    "BERT large": "64:512:full:16/16:b32",
    "ViT-L/16 at 224": "64:197:full:16/16:b128",
    "SigLIP So400m at 384": "72:729:full:16/16:b32",
    "DINOv2 ViT-g/14 at 518": "64:1370:full:24/24:b8",
    "Swin-T, stage 2, windows of 7 x 7": "32:49:full:6/6:b2048",
    "Whisper large v3, encoder": "64:1500:full:20/20:b8",
    "Whisper large v3, cross attention": "64:448x1500:full:20/20:b8",
    "Stable Diffusion XL at 1,024, 64 x 64": "64:4096:full:10/10:b2",
    "Stable Diffusion XL, its cross attention": "64:4096x77:full:10/10:b2",
    "FLUX.1 at 1,024": "128:4608:full:24/24:b1",
    "Wan 2.1 1.3B, 480p": "128:32760:full:12/12:b1",
}
SERVED = {
    "Llama 3 8B, a prompt of 512": "128:512:causal:32/8:b1",
    "Llama 3 8B, eight of 512": "128:512:causal:32/8:b8",
    "Llama 3 8B, a chunk of 512 at 8,192": "128:512x8192:causal:32/8:b1",
    "Llama 3 8B, a chunk of 2,048 at 32,768": "128:2048x32768:causal:32/8:b1",
    "Llama 3 8B, 128 rows at 32,768": "128:128x32768:causal:32/8:b1",
    "Llama 3 70B, a GPU's share of 8, a chunk of 512 at 32,768": "128:512x32768:causal:8/1:b1",
    "Llama 3 70B, a GPU's share of 8, 256 rows at 131,072": "128:256x131072:causal:8/1:b1",
    "Qwen 3 32B, a GPU's share of 4, a prompt of 1,024": "128:1024:causal:16/2:b1",
    "Gemma 2 9B, a chunk of 256 at 8,192": "256:256x8192:causal:16/8:b1",
    "gpt-oss 20B, a chunk of 256 at 16,384": "64:256x16384:causal:64/8:b1",
    "Whisper large v3, encoder, a request": "64:1500:full:20/20:b1",
    "ViT-L/16 at 224, a request": "64:197:full:16/16:b1",
}
MODELS_FORWARD = [*TRAINED.values(), *SERVED.values()]
MODELS_BACKWARD = ["backward:" + cell for cell in TRAINED.values()]
GPU_CELLS = {"grid": grid((64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)),
             "backward": ["backward:" + cell for cell in grid((64, 128), (8192,))],
             "backward_grid": ["backward:" + cell for cell in grid((64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384))],
             "backward_dims": [f"backward:{dims}:8192:causal" for dims in ("40", "72", "80", "96", "112", "160", "192")] + ["backward:192/128:8192:causal:16"],
             "backward_gqa": [f"backward:128:{seqlen}:{mask}:64/8" for mask in ("full", "causal") for seqlen in (2048, 8192, 32768)],
             "decode": ["decode:" + cell for cell in (
                 "1x8192", "1x131072", "16x8192", "64x8192", "16x32768", "1x100000+63x500:p16",
                 "16x8192:p1", "16x8192:p16", "16x8192:p64", "16x8192:p256",
                 "16x8192:8/8", "16x8192:64/8", "128x8192:64/1", "16x8192:q8", "16x8192:q16")],
             "decode_8bit": ["decode:" + sizes + pages + kv_dtype for sizes in ("64x8192", "16x32768") for pages in ("", ":p16")
                             for kv_dtype in ("", ":fp8_e4m3", ":fp8_e4m3/token_head", ":int8", ":int8/token_head")],
             "decode_formulas": ["decode:16x8192" + formula for formula in ("", ":alibi", ":softcap", ":sinks")],
             # Gemma 4's full layers have heads of 512.
             "wide": [f"{dim}:8192:{mask}:4/4:b2" for dim in (512, 384, 320) for mask in ("full", "causal")],
             "wide_backward": [f"backward:{dim}:8192:{mask}:4/4:b2" for dim in (512, 384, 320) for mask in ("full", "causal")],
             "wide_decode": ["decode:16x8192:16/4:d512", "decode:16x8192:16/4:d512:p64"],
             # DeepSeek V3 and Kimi K2 have 128 query heads, GLM 5 has 64; 16 are a GPU's share of 8.
             "latent": [f"decode:{cell}" for cell in (
                 "128x4096:128/1:p64:latent", "64x8192:128/1:p64:latent", "64x8192:128/1:q2:p64:latent", "1x8192:128/1:p64:latent",
                 "1x32768:128/1:q2:p64:latent", "1x32768:16/1:p64:latent", "64x8192:16/1:p64:latent", "16x32768:16/1:p64:latent",
                 "16x8192:64/1:p64:latent", "1x100000+63x500:16/1:p64:latent")],
             "latent_8bit": [f"decode:{cell}:p64:latent{kv_dtype}" for cell in ("64x8192:16/1", "16x32768:16/1", "64x8192:128/1")
                             for kv_dtype in ("", ":fp8_e4m3")],
             "append": ["append:" + cell for cell in (
                 "16x8192", "16x8192:q", "16x8192:p16", "16x8192:fp8_e4m3", "16x8192:fp8_e4m3/token_head", "16x8192:int8/token_head",
                 "64x1", "64x1:p16", "64x1:fp8_e4m3/token_head")],
             "formulas": ["formula:" + name for name in (
                 "none", "causal", "window", "causal_formula", "window_formula", "prefix_lm", "alibi", "softcap",
                 "softcap_precise", "t5", "alibi:causal", "softcap:causal", "softcap_precise:causal", "t5:causal")],
             "formulas_backward": ["formula:" + name for name in (
                 "none:backward", "causal:backward", "window:backward", "padding:backward", "blocks_0.5:backward",
                 "blocks_0.2:backward", "blocks_0.05:backward", "alibi:backward", "softcap:backward", "t5:backward",
                 "t5:backward:learned")],
             "models": MODELS_FORWARD, "backward_models": MODELS_BACKWARD,
             "documents": ["documents:" + part for part in ("whole", "attention", "lists", "lists:b1", "whole:causal", "attention:causal")]}
CPU_CELLS = {"grid": grid((64, 80, 128), (128, 512, 1024, 4096)),
             "masks": [f"128:4096:{mask}" for mask in ("padding", "window", "blocks")],
             "backward": ["backward:" + cell for cell in grid((64, 128), (512, 1024, 2048, 4096))],
             "backward_masks": [f"backward:128:4096:{mask}" for mask in ("padding", "window", "blocks")],
             "few_rows": [f"{dim}:{rows}x{keys}:full" for dim in (64, 128) for rows in (1, 2, 4, 8, 16) for keys in (64, 512, 1500, 8192)],
             "decode": ["decode:1x32768"]}
DENSITIES = (0.5, 0.2, 0.05)  # of listed blocks
# A formula cell adds this to the spec; the second is the cell that has no formula.
FORMULAS = {
    "none": ({}, None),
    "causal": ({"mask": ["causal"]}, None),
    "window": ({"mask": ["sliding_window"]}, None),
    "padding": ({"mask": ["padding"]}, "none"),
    **{f"blocks_{density}": ({"mask": [{"kind": "block_sparse", "block_m": 128, "block_n": 128}]}, "none") for density in DENSITIES},
    "causal_formula": ({"mask": ["key <= position"]}, "causal"),
    "window_formula": ({"mask": ["position - key < 1024 && key <= position"]}, "window"),
    "prefix_lm": ({"mask": ["prefix_lm"]}, "none"),
    "alibi": ({"score": ["alibi"]}, "none"),
    "softcap": ({"score": ["softcap"]}, "none"),
    "softcap_precise": ({"score": ["softcap"], "precise": True}, "none"),
    "t5": ({"score": ["score + bias[head, min(abs(key - position), 127)]"],
            "tables": {"bias": {"dtype": "fp32", "shape": ["heads_q", 128]}}}, "none"),
}
DECODE_FORMULAS = {"alibi": {"score": ["alibi"]}, "softcap": {"score": ["softcap"]}, "sinks": {"sink_logits": True}}


class Cell:
    """A problem: [backward:]HEAD_DIM[/HEAD_DIM_V]:ROWS[xKEYS]:MASK[:HEADS_Q[/HEADS_KV]][:bBATCH]. There are as many keys as rows,
    and 2048 / head_dim heads, unless given; causal is aligned to the last key. On a CPU `tokens` is None and batch * heads is 8."""

    def __init__(self, text, tokens):
        cpu = tokens is None
        self.name, self.op, self.mode = text, "forward", "fwd"
        if text.startswith("backward:"):
            self.op, self.mode, text = "backward", "bwd", text[len("backward:"):]
        try:
            dims, seqlen, self.mask, *more = text.split(":")
            self.dim, self.dim_v = [int(x) for x in (dims.split("/") * 2)[:2]]
            self.seqlen, self.seqlen_k = [int(x) for x in (seqlen.split("x") if "x" in seqlen else (seqlen, seqlen))]
            self.causal = self.mask == "causal"
            heads = [option for option in more if option[0] != "b"]
            batch = [int(option[1:]) for option in more if option[0] == "b"]
            if len(heads) > 1 or len(batch) > 1 or self.mask not in (MASKS if cpu else ("full", "causal")):
                raise ValueError
            self.batch = 1 if cpu else max(1, tokens // self.seqlen)
            self.heads_q = self.heads_kv = 8 if cpu else max(1, 2048 // self.dim)
            if cpu and self.mask == "padding":  # sequences of different lengths
                self.batch, self.heads_q, self.heads_kv = 4, 2, 2
            if heads:
                self.heads_q, self.heads_kv = [int(x) for x in (heads[0].split("/") * 2)[:2]]
            if batch:
                self.batch = batch[0]
        except (ValueError, IndexError):
            raise SystemExit(f"cell {text!r} is not HEAD_DIM[/HEAD_DIM_V]:ROWS[xKEYS]:full|causal[:HEADS_Q[/HEADS_KV]][:bBATCH], as in "
                             "128:8192:causal or backward:192/128:2048:full:64/8:b1; masks on a CPU are also padding, window and blocks")

    def flops(self):
        of_row = self.seqlen_k - (self.seqlen / 2 if self.causal else 0)
        pairs = self.batch * self.heads_q * self.seqlen * of_row
        return (2.5 if self.op == "backward" else 1) * 2 * pairs * (self.dim + self.dim_v)

    def tflops(self, ms):
        return self.flops() / ms * 1e-9

    def specs(self, dtype, dropout):
        """The specs of the launches that the cell has, one after the other."""
        return [{"op": self.op, "dtype": dtype, "head_dim": self.dim, "head_dim_v": self.dim_v, "mask": MASKS[self.mask], "lse": True,
                 "dropout": dropout}]

    def request(self):
        return {"causal": self.causal, "flops": self.flops(), **({"sk": self.seqlen_k} if self.seqlen_k != self.seqlen else {})}

    def flashjit_request(self):
        return {"shapes": [{"batch": self.batch, "seqlen_q": self.seqlen, "seqlen_k": self.seqlen_k, "num_heads_q": self.heads_q, "num_heads_kv": self.heads_kv}]}


KV_DTYPES = ("int8", "fp8_e4m3", "fp8_e5m2")


def kv_of(option):
    """The kv_dtype and kv_scale that KV_DTYPE[/KV_SCALE] names; a ValueError if there are none such."""
    kv_dtype, kv_scale = (option.split("/") + ["tensor"])[:2]
    if kv_dtype not in KV_DTYPES or kv_scale not in ("tensor", "head", "token_head"):
        raise ValueError
    return kv_dtype, kv_scale


def kv_fields(cell):
    return {"kv_dtype": cell.kv_dtype, "kv_scale": cell.kv_scale} if cell.kv_dtype else {}


class Decode:
    """Query rows against caches: decode:COUNTxKEYS[+COUNTxKEYS...][:HEADS_Q/HEADS_KV][:qROWS][:pPAGE_SIZE][:dHEAD_DIM][:latent]
    [:FORMULA]. Without more it has 32/8 heads of 128, a row, no pages and no formula. A latent cache has 576 columns, the
    first 512 of which are V; several rows against it are causal."""

    mask, causal, op, mode = "decode", False, "decode", "fwd"

    def __init__(self, text):
        self.name, self.rows, self.page_size, self.heads_q, self.heads_kv, self.formula = text, 1, 0, 32, 8, None
        self.kv_dtype = self.kv_scale = None
        self.latent, self.dim, self.dim_v = False, 128, 128
        try:
            _, sizes, *more = text.split(":")
            sizes = [[int(x) for x in size.split("x")] for size in sizes.split("+")]
            self.lengths = [keys for count, keys in sizes for _ in range(count)]
            for option in more:
                if option[0].isdigit():
                    self.heads_q, self.heads_kv = [int(x) for x in option.split("/")]
                elif option.split("/")[0] in KV_DTYPES:
                    self.kv_dtype, self.kv_scale = kv_of(option)
                elif option in DECODE_FORMULAS:
                    self.formula = option
                elif option == "latent":
                    self.latent, self.dim, self.dim_v = True, 576, 512
                elif option[0] == "d":
                    self.dim = self.dim_v = int(option[1:])
                else:
                    setattr(self, {"q": "rows", "p": "page_size"}[option[0]], int(option[1:]))
            self.batch, self.seqlen, self.ragged = len(self.lengths), max(self.lengths), len(sizes) > 1
        except (ValueError, KeyError, IndexError):
            raise SystemExit(f"cell {text!r} is not decode:COUNTxKEYS[+COUNTxKEYS...][:HEADS_Q/HEADS_KV][:qROWS][:pPAGE_SIZE][:dHEAD_DIM]"
                             "[:latent][:FORMULA][:KV_DTYPE[/KV_SCALE]], as in decode:16x8192:alibi, decode:1x100000+63x500:64/8:q8:p16 or decode:64x8192:int8/token_head")

    def key_elements(self):
        return sum(self.lengths) * self.heads_kv * (self.dim + (0 if self.latent else self.dim_v))

    def bytes(self, element):
        stored = self.key_elements() * (1 if self.kv_dtype else element)
        return stored + sum(self.lengths) * self.heads_kv * 8 * (self.kv_scale == "token_head")

    def flops(self):
        return 2 * self.rows * sum(self.lengths) * (self.dim + self.dim_v) * self.heads_q

    def compares_with(self, other):
        """Whether the last column is this decode's rate relative to that of `other`."""
        if (self.latent, self.dim) != (other.latent, other.dim) or (self.latent and not self.kv_dtype):
            return False
        same = (self.lengths, self.heads_q, self.heads_kv) == (other.lengths, other.heads_q, other.heads_kv)
        if self.kv_dtype or self.formula:
            return same and (other.page_size, other.rows, other.formula, other.kv_dtype) == (self.page_size, self.rows, None, None)
        if other.kv_dtype:
            return False
        if self.page_size:
            return same and other.page_size == 0 and other.rows == self.rows
        if other.page_size or other.rows > 1 or other.formula:
            return False
        if self.rows > 1:
            return same
        return (self.heads_q, self.heads_kv) in ((64, 8), (64, 1)) and (other.heads_q, other.heads_kv) == (8, 8) and \
            other.key_elements() == self.key_elements()

    def specs(self, dtype, dropout):
        latent = {"head_dim_v": self.dim_v, "v_in_k": True, **({"mask": ["causal"]} if self.rows > 1 else {})} if self.latent else {}
        return [{"op": "decode", "dtype": dtype, "head_dim": self.dim, "lse": False, "paged": self.page_size > 0, **latent,
                 **DECODE_FORMULAS.get(self.formula, {}), **kv_fields(self)}]

    def request(self):
        return {"op": "decode", "sq": self.rows, "lengths": self.lengths if self.ragged else None, "page_size": self.page_size,
                "kv_dtype": self.kv_dtype, "latent": self.latent, "bytes": self.bytes(2)}

    def flashjit_request(self):
        shape = {"seqlen_q": self.rows, "num_heads_q": self.heads_q, "num_heads_kv": self.heads_kv}
        if self.page_size:
            shape["page_size"] = self.page_size
        if self.ragged:
            return {"shapes": [shape], "lengths_k": self.lengths}
        return {"shapes": [{**shape, "batch": self.batch, "seqlen_k": self.seqlen}]}


class Formula:
    """A forward or a backward with a formula: formula:NAME[:causal][:backward][:learned], batch 4, 16 heads, 8,192 keys, head_dim 128.
    learned: with the gradient of its table."""

    dim = dim_v = 128
    batch, heads_q, heads_kv, seqlen = 4, 16, 16, 8192
    mask, op, mode = "formula", "forward", "fwd"

    def __init__(self, text):
        self.name, self.pairs = text, None
        _, self.formula, *more = text.split(":")
        if self.formula not in FORMULAS or not set(more) <= {"causal", "backward", "learned"}:
            raise SystemExit(f"cell {text!r} is not formula:NAME[:causal][:backward][:learned] with a NAME of {', '.join(FORMULAS)}")
        self.causal, self.learned = "causal" in more, "learned" in more
        if "backward" in more:
            self.op, self.mode = "backward", "bwd"
        self.fields, base = FORMULAS[self.formula]
        if self.causal:
            self.fields = {**self.fields, "mask": [*self.fields.get("mask", []), "causal"]}
        if self.learned:
            self.fields = {**self.fields, "tables": {name: {**table, "grad": True} for name, table in self.fields["tables"].items()}}
        self.base = base and "formula:" + ("causal" if self.causal and base == "none" else base) + ":backward" * (self.op == "backward")
        # Each side draws masks of its own, so rates on kept pairs are compared: a side's time is scaled to all pairs.
        self.scales = self.formula == "padding" or self.formula.startswith("blocks_")
        self.density = self.formula.startswith("blocks_") and self.share_of_blocks()

    def compares_with(self, other):
        return other.name == self.base

    def share_of_blocks(self):
        """What FlexAttention's mask keeps: the blocks on the diagonal, and a share of the others."""
        share = float(self.formula.split("_")[1])
        return f"{share + (1 - share) * 128 / self.seqlen:.4f}"

    def specs(self, dtype, dropout):
        return [{"op": self.op, "dtype": dtype, "head_dim": self.dim, **self.fields}]

    def request(self):
        return {"op": "formula", "formula": self.formula, "causal": self.causal, "learned": self.learned}

    def flashjit_request(self):
        return {"shapes": [{"batch": self.batch, "seqlen_q": self.seqlen, "num_heads_q": self.heads_q, "num_heads_kv": self.heads_kv}]}

    def all_flops(self):
        return (10 if self.op == "backward" else 4) * self.batch * self.heads_q * self.seqlen**2 * self.dim


class Documents:
    """Documents of 1,500 rows by a formula, with block lists: documents:PART[:causal][:bBATCH]. PART is lists (make_block_lists; the peer's
    block mask), attention (a forward with lists that are there) or whole (both). 16,384 rows, 16 heads, head_dim 128; batch 4 without more."""

    dim = dim_v = 128
    heads_q = heads_kv = 16
    seqlen, length = 16384, 1500
    mask, op, mode = "documents", "forward", "fwd"

    def __init__(self, text):
        self.name, self.batch, self.causal = text, 4, False
        try:
            _, self.part, *more = text.split(":")
            if self.part not in ("whole", "attention", "lists"):
                raise ValueError
            for option in more:
                if option == "causal":
                    self.causal = True
                elif option[0] == "b":
                    self.batch = int(option[1:])
                else:
                    raise ValueError
        except (ValueError, IndexError):
            raise SystemExit(f"cell {text!r} is not documents:whole|attention|lists[:causal][:bBATCH], as in documents:lists:b1")

    def specs(self, dtype, dropout):
        ops = {"whole": ["make_block_lists", "forward"], "attention": ["forward"], "lists": ["make_block_lists"]}[self.part]
        masks = [{"kind": "block_sparse", "of_masks": True}, "document[key] == document[position]", *["causal"] * self.causal]
        return [{"op": op, "dtype": dtype, "head_dim": self.dim, "mask": masks,
                 "tables": {"document": {"dtype": "int32", "shape": ["batch", "seqlen_k"]}}} for op in ops]

    def write_table(self, path):
        """Writes the documents' numbers as a .npy file."""
        row = array.array("i", (key // self.length for key in range(self.seqlen)))
        header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({self.batch}, {self.seqlen}), }}"
        header += " " * (63 - (len(header) + 10) % 64) + "\n"
        with open(path, "wb") as file:
            file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + row.tobytes() * self.batch)

    def request(self):
        return {"op": "documents", "part": self.part, "causal": self.causal, "length": self.length}

    def flashjit_request(self):
        return {"shapes": [{"batch": self.batch, "seqlen_q": self.seqlen, "num_heads_q": self.heads_q, "num_heads_kv": self.heads_kv}]}


class Append:
    """New tokens with rotary embedding: append:BATCHxTOKENS[:HEADS_Q/HEADS_KV][:q][:pPAGE_SIZE][:KV_DTYPE[/KV_SCALE]], head_dim 128; q: Q is
    rotated in the launch. Without more it has 32/8 heads and no pages."""

    dim = dim_v = 128
    mask, causal, op, mode = "append", False, "append_kv", "fwd"

    def __init__(self, text):
        self.name, self.rotates_q, self.page_size, self.heads_q, self.heads_kv = text, False, 0, 32, 8
        self.kv_dtype = self.kv_scale = None
        try:
            _, sizes, *more = text.split(":")
            self.batch, self.seqlen = [int(x) for x in sizes.split("x")]
            for option in more:
                if option == "q":
                    self.rotates_q = True
                elif option[0] == "p":
                    self.page_size = int(option[1:])
                elif option[0].isdigit():
                    self.heads_q, self.heads_kv = [int(x) for x in option.split("/")]
                else:
                    self.kv_dtype, self.kv_scale = kv_of(option)
        except (ValueError, IndexError):
            raise SystemExit(f"cell {text!r} is not append:BATCHxTOKENS[:HEADS_Q/HEADS_KV][:q][:pPAGE_SIZE][:KV_DTYPE[/KV_SCALE]], as in "
                             "append:16x8192:q:p16 or append:64x1:fp8_e4m3/token_head")

    def bytes(self):
        stored = 2 * self.dim * (1 if self.kv_dtype else 2) + (8 if self.kv_scale == "token_head" else 0)
        of_q = self.heads_q * 2 * 2 * self.dim if self.rotates_q else 0
        return self.batch * self.seqlen * (self.heads_kv * (4 * self.dim + stored) + of_q)

    def flops(self):
        return self.bytes()

    def compares_with(self, other):
        """Whether the last column is this append's rate relative to that of `other`: with pages to the same without."""
        return bool(self.page_size) and other.page_size == 0 and self.name.replace(f":p{self.page_size}", "") == other.name

    def specs(self, dtype, dropout):
        return [{"op": "append_kv", "dtype": dtype, "head_dim": self.dim, "paged": self.page_size > 0, "rotary": {"q": self.rotates_q},
                 **kv_fields(self)}]

    def request(self):
        return {"op": "append", "bytes": self.bytes()}

    def flashjit_request(self):
        shape = {"batch": self.batch, "seqlen_q": self.seqlen, "seqlen_k": max(self.seqlen, 16), "num_heads_q": self.heads_q,
                 "num_heads_kv": self.heads_kv}
        return {"shapes": [{**shape, "page_size": self.page_size} if self.page_size else shape]}


def cell_of(text, tokens):
    """The cell of that name. On a CPU `tokens` is None."""
    kinds = {"decode": Decode, "formula": Formula, "documents": Documents, "append": Append}
    kind = kinds.get(text.split(":")[0])
    return kind(text) if kind else Cell(text, tokens)
