"""transformers' models with attn_implementation="flashjit", against eager attention in float64.

On a GPU if PyTorch has one, with bf16; else on the CPU, with fp32.
"""

import copy
import inspect
import unittest
from unittest import mock

import flashjit
import flashjit.compat.transformers as drop_in
import torch
import transformers as of
from torch_test import DEVICE, DTYPE, ROUNDING
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask

drop_in.register()
of.logging.set_verbosity_error()
ROWS, WINDOW = 40, 9
SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
CONFIGS = {
    "Llama": (of.LlamaForCausalLM, of.LlamaConfig(**SIZES)),
    "Mistral": (of.MistralForCausalLM, of.MistralConfig(**SIZES, sliding_window=WINDOW)),
    "Gemma 2": (of.Gemma2ForCausalLM, of.Gemma2Config(**SIZES, sliding_window=WINDOW, attn_logit_softcapping=0.5)),
    "Gemma 3": (of.Gemma3ForCausalLM, of.Gemma3TextConfig(**SIZES, sliding_window=WINDOW, layer_types=LAYERS)),
    "Qwen 3": (of.Qwen3ForCausalLM, of.Qwen3Config(**SIZES)),
    "gpt-oss": (of.GptOssForCausalLM, of.GptOssConfig(**SIZES, sliding_window=WINDOW, num_local_experts=1,
        num_experts_per_tok=1, rope_parameters={"rope_type": "default", "rope_theta": 1e4})),
}  # fmt: skip
T5 = of.T5Config(vocab_size=97, d_model=64, d_kv=32, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
                 decoder_start_token_id=0)  # fmt: skip
VIT = of.ViTConfig(hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=24,
                   patch_size=4)  # fmt: skip
# A weight is off by what exp is, 2^-19, by sums of up to ROWS keys and head_dim products, and by its dtype's rounding.
NOISE = 2.0**-18 + 2 * ROUNDING[DTYPE]


def attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, softcap=None, s_aux=None,
           position_bias=None, **more):  # fmt: skip
    """Attention in the dtype of query, as transformers' interface asks for; masks are of bool or added to scores."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if position_bias is None else scores + position_bias
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    elif attention_mask is not None:
        scores = scores + attention_mask
    sinks = [] if s_aux is None else [s_aux[None, :, None, None].expand(*scores.shape[:3], 1)]
    every = torch.cat([scores, *sinks], -1)
    empty = (every == -torch.inf).all(-1, keepdim=True)  # a row of padding, which is 0
    weights = every.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)[..., : scores.shape[-1]]
    return (weights @ value).transpose(1, 2), None


def noisy(*arguments, **keywords):
    """Attention whose outputs and gradients are off by as much as a kernel's may be."""
    generator = torch.Generator(DEVICE).manual_seed(5)
    o, _ = attend(*arguments, **keywords)
    return o * (1 + NOISE * (2 * torch.rand(o.shape, generator=generator, dtype=o.dtype) - 1)), None


def dense(*arguments, **keywords):
    """transformers' whole mask of bool."""
    skips = "allow_is_causal_skip", "allow_is_bidirectional_skip"
    return of.masking_utils.sdpa_mask(*arguments, **{**keywords, **dict.fromkeys(skips, False)})


for name, function in (("exact", attend), ("noisy", noisy)):
    of.AttentionInterface.register(name, function)
    of.AttentionMaskInterface.register(name, dense)


def made(cls, config, dtype=DTYPE):
    """The model, and its copy that computes attention in float64."""
    torch.manual_seed(1)
    config = copy.deepcopy(config)
    config._attn_implementation = config._experts_implementation = "eager"
    model = cls(config).to(DEVICE, dtype)
    for name, weight in model.named_parameters():
        if "sinks" in name or "bias" in name:
            torch.nn.init.normal_(weight)
        elif weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)  # so that scores are of the order of 1
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("exact")
    model.set_attn_implementation("flashjit")
    return model, exact


def tokens(rows=ROWS, seed=2):
    return torch.randint(2, 96, (2, rows), generator=torch.Generator(DEVICE).manual_seed(seed))


class Compared(unittest.TestCase):
    def compare(self, model, exact, call, rows=slice(None)):
        """Outputs and gradients of a loss.

        They may be off as far as noise makes them in attention of float64, 8 times over, and 4 times as far as those of
        eager attention, for what the rest of the model rounds.
        """

        def step(of_model):
            of_model.zero_grad()
            o = call(of_model)[rows]
            loss = o.double().square().mean() if o.dim() < 3 else torch.nn.functional.cross_entropy(
                o.double().flatten(0, -2), torch.arange(o[..., 0].numel()) % o.shape[-1])
            loss.backward()
            return [o.detach(), *[p.grad for p in of_model.parameters() if p.grad is not None]]

        computed, wanted = step(model), step(exact)
        exact.set_attn_implementation("noisy")
        shaken = step(exact)
        exact.set_attn_implementation("exact")
        model.set_attn_implementation("eager")
        eager = step(model)
        model.set_attn_implementation("flashjit")
        self.assertEqual(len(computed), len(wanted))
        most = max(x.abs().max() for x in wanted[1:])
        for place, (one, of_wanted, noise, of_eager) in enumerate(zip(computed, wanted, shaken, eager)):
            largest = max(of_wanted.abs().max(), most if place else 0)  # keys' biases have gradients of 0
            off, of_noise, of_rest = ((x.double() - of_wanted).abs().max() for x in (one, noise, of_eager))
            self.assertGreater(largest, 0)
            self.assertLessEqual(of_rest, largest * 2**10 * ROUNDING[DTYPE])  # the same is compared
            self.assertLessEqual(off, 8 * of_noise + 4 * of_rest + (NOISE * most if place else 0))

    def test_decoders(self):
        """Causal, with windows, soft caps and sinks; whole, padded on the left, and packed."""
        ids = tokens()
        padding = torch.ones_like(ids)
        padding[1, :7] = 0
        positions = torch.arange(ROWS).repeat(2, 1)
        positions[0, 25:] -= 25
        positions[1, 12:] -= 12
        for name, (cls, config) in CONFIGS.items():
            model, exact = made(cls, config)
            for what, rows, arguments in (
                ("whole", slice(None), {}),
                ("padded", padding.bool(), {"attention_mask": padding}),
                ("packed", slice(None), {"position_ids": positions}),
            ):
                with self.subTest(name, what=what):
                    self.compare(model, exact, lambda m: m(ids, use_cache=False, **arguments).logits, rows)

    def test_encoder_and_decoder(self):
        """T5: learned biases of scores, and keys of another sequence."""
        model, exact = made(of.T5ForConditionalGeneration, T5)
        padding = torch.ones(2, ROWS, dtype=torch.int64)
        padding[0, 30:] = 0
        ids, wanted = tokens(), tokens(23, 3)
        self.compare(model, exact, lambda m: m(ids, attention_mask=padding, decoder_input_ids=wanted).logits)

    def test_images(self):
        model, exact = made(of.ViTModel, VIT)
        pixels = torch.rand(2, 3, 24, 24, generator=torch.Generator(DEVICE).manual_seed(4))
        self.compare(model, exact, lambda m: m(pixels.to(m.dtype)).last_hidden_state)

    def test_masks_of_tensors(self):
        """Of bool and added to scores, with a soft cap, too; they may be of one entry, head or row."""
        ids = tokens()
        generator = torch.Generator(DEVICE).manual_seed(6)
        for name in ("Llama", "Gemma 2"):
            model, exact = made(*CONFIGS[name])
            for shape in ((2, 1, ROWS, ROWS), (1, 4, 1, ROWS)):
                kept = torch.rand(shape, generator=generator) > 0.3
                kept[..., 0] = True
                added = torch.rand(shape, generator=generator).masked_fill(~kept, -torch.inf)
                for mask in (kept, added):
                    with self.subTest(name, shape=shape, dtype=mask.dtype):
                        def call(m):
                            given = mask
                            if m.config._attn_implementation == "eager" and mask is kept:  # it adds what it is given
                                given = torch.zeros(shape).masked_fill(~kept, -torch.inf)
                            given = given if given.dtype == torch.bool else given.to(m.dtype)
                            return m(ids, attention_mask=given, use_cache=False).logits
                        self.compare(model, exact, call)

    def test_packed_by_lengths(self):
        """cu_seq_lens_q, with which transformers gives no mask, and beside a window."""
        ids = tokens(2 * ROWS)[:1]
        begins = torch.tensor([0, 11, 50, 2 * ROWS], dtype=torch.int32)
        lengths = {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins, "max_length_q": 39, "max_length_k": 39}
        positions = torch.cat([torch.arange(n) for n in begins.diff()])[None]
        for name in ("Llama", "Mistral"):
            model, exact = made(*CONFIGS[name])

            def call(m):
                if m.config._attn_implementation != "flashjit":
                    return m(ids, position_ids=positions, use_cache=False).logits
                return m(ids, position_ids=positions, use_cache=False, **lengths).logits

            self.compare(model, exact, call)
            with mock.patch.object(of.masking_utils, "find_packed_sequence_indices", lambda positions: None):
                o = call(model)
            torch.testing.assert_close(o, call(model), rtol=2.0**-6, atol=2.0**-6)


class Generated(unittest.TestCase):
    def test_caches(self):
        """Prompts of other lengths, and one token after the other, in caches that grow, that slide and of fixed sizes."""
        ids = tokens(12)
        padding = torch.ones_like(ids)
        padding[0, :5] = 0
        for name in ("Llama", "Gemma 2", "gpt-oss"):
            model, exact = made(*CONFIGS[name])
            for cache in ("dynamic", "static"):
                with self.subTest(name, cache=cache):
                    common = {"attention_mask": padding, "do_sample": False, "return_dict_in_generate": True,
                              "output_logits": True, "disable_compile": True}  # fmt: skip
                    wanted = exact.generate(ids, max_new_tokens=6, cache_implementation="dynamic", **common)
                    o = model.generate(ids, max_new_tokens=6, cache_implementation=cache, **common)
                    if DTYPE == torch.float32:
                        self.assertTrue(torch.equal(o.sequences, wanted.sequences))
                    for one, of_wanted in zip(o.logits[:1] if DTYPE != torch.float32 else o.logits, wanted.logits):
                        rounding = 2.0**-12 if DTYPE == torch.float32 else 2.0**-3
                        torch.testing.assert_close(one.double(), of_wanted.double(), rtol=0, atol=rounding)

    def test_lengths_make_no_new_formulas(self):
        """Each new token makes a mask of another length."""
        from flashjit.compat import _flex

        model, _ = made(*CONFIGS["Llama"])
        ids = tokens(12)
        padding = torch.ones_like(ids)
        padding[0, :5] = 0
        cache = of.DynamicCache(config=model.config)
        counts, named = [], "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        with torch.no_grad():
            for _ in range(4):
                model(ids if not counts else ids[:, :1], attention_mask=padding, **{named: cache})
                padding = torch.nn.functional.pad(padding, (0, 1), value=1)
                counts.append(len(_flex._traces))
        self.assertEqual(counts[1], counts[3])


class Functions(unittest.TestCase):
    def test_names(self):
        """ "flashjit" is none of FlashAttention's implementations, as names with "flash" are for transformers."""
        model, _ = made(*CONFIGS["gpt-oss"])
        self.assertEqual(model.config._attn_implementation, "flashjit")
        for module in (of.masking_utils, of.modeling_utils, of.utils.generic):
            asked = module.is_flash_attention_requested
            self.assertFalse(asked(model.config))
            self.assertFalse(asked(requested_attention_implementation="flashjit"))
            self.assertTrue(asked(requested_attention_implementation="flash_attention_2"))
        with mock.patch.object(drop_in, "make_mask", wraps=drop_in.make_mask) as masked:
            drop_in.register("another")
            model.set_attn_implementation("another")
            model(tokens(), use_cache=False)
        self.assertTrue(masked.called)

    def test_masks_are_formulas(self):
        """No mask is made where causal attention is one, and else lists of blocks, without the whole mask."""
        config = copy.deepcopy(CONFIGS["Llama"][1])
        config._attn_implementation = "flashjit"
        x = torch.zeros(2, 300, 64)
        cache = None  # by place, since its name differs between versions
        self.assertIsNone(create_causal_mask(config, x, None, cache))
        self.assertIsNone(create_causal_mask(config, x, torch.ones(2, 300), cache))
        padding = torch.ones(2, 300)
        padding[0, :150] = 0
        mask = create_causal_mask(config, x, padding, cache)
        kept = torch.ones(300, 300, dtype=torch.bool).tril() & padding.bool()[:, None, None]
        blocks = torch.nn.functional.pad(kept, (0, 84, 0, 84)).unflatten(3, (3, 128)).unflatten(2, (3, 128)).any(5).any(3)
        self.assertTrue(torch.equal(mask.to_dense().bool(), blocks))
        config.attention_chunk_size = 50
        chunks = create_chunked_causal_mask(config, x, padding, cache)
        q = torch.rand(2, 4, 300, 32, dtype=DTYPE)
        o, _ = drop_in.attention_forward(torch.nn.Module(), q, q, q, chunks)
        config._attn_implementation = "sdpa"
        dense = create_chunked_causal_mask(config, x, padding, cache)
        wanted, _ = drop_in.attention_forward(torch.nn.Module(), q, q, q, dense)
        torch.testing.assert_close(o, wanted, rtol=2.0**-6, atol=2.0**-6)

    def test_compiled(self):
        """Whole graphs where there is no mask of formulas, and the same results where there is one."""
        ids, pixels = tokens(), torch.rand(2, 3, 24, 24, dtype=DTYPE)
        padding = torch.ones_like(ids)
        padding[1, :7] = 0
        torch._dynamo.reset()
        for (cls, config), inputs, whole in (
            ((of.ViTModel, VIT), {"pixel_values": pixels}, True),
            (CONFIGS["Llama"], {"input_ids": ids, "attention_mask": padding, "use_cache": False}, False),
        ):
            config = copy.deepcopy(config)
            config.num_hidden_layers = 1
            model, _ = made(cls, config)
            compiled = torch.compile(model, backend="aot_eager", fullgraph=whole)
            with torch.no_grad():
                one, other = (m(**inputs)[0] for m in (compiled, model))
            torch.testing.assert_close(one, other, rtol=2.0**-6, atol=2.0**-6)

    def test_dropout(self):
        config = copy.deepcopy(CONFIGS["Llama"][1])
        config.attention_dropout = 0.5
        model, _ = made(of.LlamaForCausalLM, config)
        ids, made_of = tokens(), []
        for training, seed in ((False, 1), (True, 1), (True, 1), (True, 2)):
            torch.manual_seed(seed)
            made_of.append(model.train(training)(ids, use_cache=False).logits.detach())
        self.assertTrue(torch.equal(made_of[1], made_of[2]))
        self.assertFalse(torch.allclose(made_of[0], made_of[1]))
        self.assertFalse(torch.allclose(made_of[1], made_of[3]))

    def test_refused(self):
        q = torch.rand(1, 4, ROWS, 32, dtype=DTYPE)
        begins = torch.tensor([0, ROWS], dtype=torch.int32)
        mask = torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool)
        for arguments, what in (
            ({"output_attentions": True}, "output_attentions.*'eager'"),
            ({"block_table": begins}, "block_table"),
            ({"cu_seq_lens_q": begins, "attention_mask": mask}, "position_ids"),
            ({"attention_mask": mask[0, 0]}, "2 dimensions"),
        ):
            with self.subTest(what), self.assertRaisesRegex(flashjit.Error, what + "|would work"):
                drop_in.attention_forward(torch.nn.Module(), q, q, q, **{"attention_mask": None, **arguments})


if __name__ == "__main__":
    unittest.main()
