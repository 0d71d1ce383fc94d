"""score_mods and mask_mods as FlexAttention's published tests and examples have them, by name.

Each is made of what it captures: B batch entries, H heads, S rows and keys, and a generator of random numbers.
"""

import functools
import math

import torch
import torch.nn.functional as F
from flashjit.compat import and_masks, or_masks

B, H, S = 2, 4, 96
GRID = 12  # columns of the 2D neighbourhoods: S is 8 of them


def tables(seed=0, device="cpu"):
    """Tensors that the functions capture."""
    generator = torch.Generator(device).manual_seed(seed)

    def uniform(*shape):
        return (torch.rand(shape, generator=generator, device=device) - 0.5).requires_grad_()

    def integers(most, *shape):
        return torch.randint(most, shape, generator=generator, device=device)

    return {
        "head": uniform(H), "entry": uniform(B, H), "rows": uniform(S), "keys": uniform(S), "pairs": uniform(S, S),
        "whole": uniform(B, H, S, S), "distances": uniform(2 * S - 1), "buckets": uniform(16, H), "one": uniform(),
        "fixed": uniform(B, H).detach(), "narrow": uniform(H).detach().bfloat16().requires_grad_(),
        "wide": uniform(H).detach().double().requires_grad_(),
        "documents": integers(4, S).sort().values, "of_entry": integers(3, B, S).sort(-1).values.int(),
        "lengths": integers(S, B) + 1, "windows": torch.tensor([3, 9, 27, 81], device=device),
        "kept": uniform(S, S).detach() > 0, "starts": (integers(3, S).sort().values * 30).int(),
        "permutation": torch.randperm(S, generator=generator, device=device),
    }  # fmt: skip


class Scaled(torch.nn.Module):
    """A score_mod that is a module."""

    def __init__(self, weights, power):
        super().__init__()
        self.weights, self.power = torch.nn.Parameter(weights), power

    def forward(self, score, b, h, q, k):
        return score * self.weights[h].exp() + self.power


class Model:
    """An object whose method is a score_mod."""

    def __init__(self, bias, gain):
        self.bias, self.gain = bias, gain

    def shifted(self, score, b, h, q, k):
        return score + self.gain * self.bias[k]


def scaled_by(factor, inner):
    def score_mod(score, b, h, q, k):
        return factor * inner(score, b, h, q, k)

    return score_mod


def added(shift, score, b, h, q, k):
    return score + shift * (k - q)


def chained(*mods):
    def score_mod(score, b, h, q, k):
        for one in mods:
            score = one(score, b, h, q, k)
        return score

    return score_mod


def bucket(distance):
    near = distance < 8
    far = 8 + (torch.log2(distance.clamp(min=1) / 8.0) * 2).to(torch.int32)
    return torch.where(near, distance, far.clamp(max=15))


def score_mods(t, cap=3.0, slope=0.05, length=S):
    """By name: the function, and the names of the tables that it reads with gradients."""
    softcap = lambda s, b, h, q, k: cap * torch.tanh(s / cap)  # noqa: E731
    relative = lambda s, b, h, q, k: s + (q - k)  # noqa: E731
    return {
        "identity": (lambda s, b, h, q, k: s, ()),
        "twice": (lambda s, b, h, q, k: s * 2, ()),
        "squared": (lambda s, b, h, q, k: s * s, ()),
        "cubed": (lambda s, b, h, q, k: s**3 / 4, ()),
        "causal": (lambda s, b, h, q, k: torch.where(q >= k, s, float("-inf")), ()),
        "inverse causal": (lambda s, b, h, q, k: s.masked_fill(q > k, float("-inf")), ()),
        "relative": (relative, ()),
        "relative causal": (lambda s, b, h, q, k: torch.where(q >= k, s + (q - k) * 0.1, -float("inf")), ()),
        "alibi": (lambda s, b, h, q, k: s + torch.exp2(-((h + 1) * 8.0 / H)) * (k - q), ()),
        "alibi of slopes": (lambda s, b, h, q, k: s - t["head"][h] * (q - k).abs() * slope, ("head",)),
        "softcap": (softcap, ()),
        "softcap by a tensor": (lambda s, b, h, q, k: torch.tanh(s / (t["one"] + 2)) * (t["one"] + 2), ("one",)),
        "head offset": (lambda s, b, h, q, k: s + t["head"][h], ("head",)),
        "entry offset": (lambda s, b, h, q, k: s + t["entry"][b, h], ("entry",)),
        "one index after the other": (lambda s, b, h, q, k: s + t["fixed"][b][h] * t["pairs"][q, k], ("pairs",)),
        "bias": (lambda s, b, h, q, k: s + t["whole"][b, h, q, k], ("whole",)),
        "bias of pairs": (lambda s, b, h, q, k: s * 0.5 + t["pairs"][q, k], ("pairs",)),
        "by rows": (lambda s, b, h, q, k: s * t["rows"][q], ("rows",)),
        "by rows and keys": (lambda s, b, h, q, k: s + t["rows"][q] * t["keys"][k], ("rows", "keys")),
        "relative table": (lambda s, b, h, q, k: s + t["distances"][q - k + length - 1], ("distances",)),
        "relative table from its end": (lambda s, b, h, q, k: s + t["distances"][q - k], ("distances",)),
        "buckets": (lambda s, b, h, q, k: s + t["buckets"][bucket((q - k).abs()), h], ("buckets",)),
        "bucket of two tables": (lambda s, b, h, q, k: s + t["rows"][t["permutation"][k]], ("rows",)),
        "computed table": (lambda s, b, h, q, k: s + torch.sigmoid(t["head"])[h] + t["pairs"].sum(0)[k], ("head", "pairs")),
        "bf16 table": (lambda s, b, h, q, k: s + t["narrow"][h], ("narrow",)),
        "float64 table": (lambda s, b, h, q, k: s + t["wide"][h], ("wide",)),
        "documents": (lambda s, b, h, q, k: torch.where(t["documents"][q] == t["documents"][k], s, -math.inf), ()),
        "documents of entries": (lambda s, b, h, q, k: torch.where(t["of_entry"][b, q] == t["of_entry"][b, k], s, s - 2), ()),
        "checkerboard": (lambda s, b, h, q, k: torch.where((q - k) % 2 == 1, s * 0.5, torch.where(b % 2 == 0, s * 2, s)), ()),
        "product with a mask": (lambda s, b, h, q, k: s * (q >= k), ()),
        "nested closures": (scaled_by(0.5, scaled_by(1.5, relative)), ()),
        "composed": (chained(softcap, functools.partial(added, slope), relative), ()),
        "partial": (functools.partial(added, slope), ()),
        "method": (Model(t["rows"], 0.5).shifted, ("rows",)),
        "logarithm of distance": (lambda s, b, h, q, k: s - torch.log1p((q - k).abs().float()), ()),
        "decay": (lambda s, b, h, q, k: s * 0.95 ** (q - k).abs(), ()),
        "root of distance": (lambda s, b, h, q, k: s / torch.sqrt(1.0 + (q - k).abs()), ()),
        "clamp": (lambda s, b, h, q, k: s.clamp(-0.5, 1.0), ()),
        "maximum": (lambda s, b, h, q, k: torch.maximum(s, t["rows"][q]), ("rows",)),
        "activations": (lambda s, b, h, q, k: torch.relu(s) + F.silu(s) - torch.sigmoid(s), ()),
        "leaky": (lambda s, b, h, q, k: F.leaky_relu(s, 0.1) + F.softplus(s) + F.mish(s), ()),
        "gelu": (lambda s, b, h, q, k: F.gelu(s, approximate="tanh") + F.elu(s), ()),
    }  # fmt: skip


def grid(index):
    return index // GRID, index % GRID


def neighbourhood(height, width):
    def mask_mod(b, h, q, k):
        (row, column), (of_row, of_column) = grid(q), grid(k)
        row = row.clamp(height // 2, S // GRID - 1 - height // 2)
        column = column.clamp(width // 2, GRID - 1 - width // 2)
        return ((row - of_row).abs() <= height // 2) & ((column - of_column).abs() <= width // 2)

    return mask_mod


def window(width):
    return lambda b, h, q, k: (q - k <= width) & (q >= k)


def causal(b, h, q, k):
    return q >= k


def any_of(masks):
    def mask_mod(b, h, q, k):
        kept = b < 0
        for one in masks:
            kept = kept | one(b, h, q, k)
        return kept

    return mask_mod


def offset(mask_mod, by):
    def shifted(b, h, q, k):
        return mask_mod(b, h, q + by, k)

    return shifted


def mask_mods(t, width=20):
    """By name."""
    documents = lambda b, h, q, k: t["documents"][q] == t["documents"][k]  # noqa: E731
    return {
        "causal": causal,
        "window": window(width),
        "window of numbers": lambda b, h, q, k: (q - k).abs() < 17,
        "prefix": lambda b, h, q, k: (k < t["lengths"][b]) | (q >= k),
        "prefix of masks": or_masks(lambda b, h, q, k: k < 40, causal),
        "documents": documents,
        "causal documents": and_masks(causal, documents),
        "documents with windows": and_masks(documents, or_masks(window(width), lambda b, h, q, k: k % 7 == 0)),
        "documents of entries": lambda b, h, q, k: t["of_entry"][b, q] == t["of_entry"][b, k],
        "lengths": lambda b, h, q, k: (k < t["lengths"][b]) & (q < t["lengths"][b]),
        "first keys": lambda b, h, q, k: (q >= k) & ((k < 4) | (q - k < width)),
        "dilated": lambda b, h, q, k: ((q - k) % 3 == 0) & ((q - k).abs() <= 30),
        "blocks": lambda b, h, q, k: q // 24 == k // 24,
        "windows of heads": lambda b, h, q, k: (q - k).abs() <= t["windows"][h],
        "heads in turn": lambda b, h, q, k: torch.where(h % 2 == 0, q >= k, q <= k),
        "neighbourhood": neighbourhood(5, 3),
        "tiles": lambda b, h, q, k: (q >> 3) // 4 == (k >> 3) // 4,
        "bits": lambda b, h, q, k: ((q & 3) == (k & 3)) | (k == q >> 1),
        "a tensor of pairs": lambda b, h, q, k: t["kept"][q, k],
        "spans": lambda b, h, q, k: (k >= t["starts"][q]) & (k < t["starts"][q] + 30),
        "global tokens": lambda b, h, q, k: (q < 3) | (k < 3) | ((q - k).abs() < 8),
        "look-ahead": lambda b, h, q, k: k <= q + 5,
        "offset": offset(causal, 11),
        "of a list": any_of([window(6), lambda b, h, q, k: k == 0]),
        "not": lambda b, h, q, k: ~((q < k) ^ (q > 70)),
        "logical": lambda b, h, q, k: torch.logical_and(q >= k, torch.logical_not(k > 50)),
        "rows without keys": lambda b, h, q, k: (q > 40) & (k <= q),
        "everything": lambda b, h, q, k: q >= 0,
    }  # fmt: skip
