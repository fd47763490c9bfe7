"""Models that differ from the usual ones where nobody looks: none may be computed wrongly."""

from __future__ import annotations

import pytest
import torch
from conftest import _SIZES, CHUNKS, NEW_PROMPTS, tiny_tokenizer
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama import modeling_llama

from cached_rag import ConfigError, Engine, wrap_model
from cached_rag.backends.machine import parse_dtype
from cached_rag.backends.transformers import batch, probe, recording
from cached_rag.backends.transformers.attention import Rows
from cached_rag.backends.transformers.decoder import frequencies
from cached_rag.backends.transformers.lean import lean_model
from cached_rag.errors import ModelError
from cached_rag.kv.buffer import KVBuffer

ENDS = {"pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1}
PLAIN = _SIZES | ENDS
BART = ENDS | {
    **{"vocab_size": 240, "d_model": 64, "max_position_embeddings": 1024},
    **{"decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 128},
    **{"encoder_layers": 4, "num_layers": 4},
    **{"is_decoder": True, "is_encoder_decoder": False},
}
AFMOE = PLAIN | {
    **{"head_dim": 16, "sliding_window": 9, "global_attn_every_n_layers": 2},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    **{"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "num_dense_layers": 1},
}
BEAM = AFMOE | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
JETMOE = ENDS | {
    **{"vocab_size": 240, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4},
    **{"num_key_value_heads": 2, "kv_channels": 16, "max_position_embeddings": 1024},
    **{"num_local_experts": 4, "num_experts_per_tok": 2},
}
GEMMA3 = {
    "text_config": _SIZES
    | {"head_dim": 16, "sliding_window": 9, "bos_token_id": 0, "eos_token_id": 1}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "pad_token_id": 2},
    "vision_config": {
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    },
    **{"mm_tokens_per_image": 4, "image_token_index": 200},
    **{"boi_token_index": 201, "eoi_token_index": 202},
}
ODD = {
    "diffllama": PLAIN,  # halves and repeats values after they were cached
    "jetmoe": JETMOE,  # repeats keys after they were cached
    "afmoe": AFMOE,  # views what attention gives back
    "beam": BEAM,  # scales queries by their position
    "gemma3": GEMMA3,  # a text model inside one of images, as Gemma 3 from 4B on is published
    "bart": BART,  # numbers the tokens itself, and adds that to embeddings
    "mbart": BART,
}


def made(kind):
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **ODD[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "embed" not in name:
                weight.mul_(3)
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    return model, wrap_model(model, tiny_tokenizer(), name=kind, revision=kind)


@pytest.mark.parametrize("kind", ODD)
def test_answers_are_those_of_the_model_itself(kind):
    model, backend = made(kind)
    with Engine(backend, NEW_PROMPTS) as engine:
        prompt = f"Some facts. {CHUNKS[1]} {CHUNKS[0]} Who?"
        ids = torch.tensor(
            [engine.tokenization.tokenize(engine.tokenization.template.render(prompt)).ids]
        )
        with torch.inference_mode():
            plain = model.generate(ids, max_new_tokens=12, do_sample=False, num_beams=1)
        expected = plain[0, ids.shape[1] :].tolist()
        engine.encode(CHUNKS[:2], context=None)
        options = {"max_tokens": 12, "ignore_eos": True}
        methods = ["full", "prefix"]
        if backend.rule.is_movable:
            methods.append("cacheblend:recompute_ratio=1.0")
        for method in methods:
            together = engine.generate_batch([prompt, CHUNKS[2]], method=method, **options)
            assert list(together[0].token_ids) == expected, method


@pytest.mark.parametrize("kind", ["bart", "mbart"])
def test_positions_that_are_added_to_embeddings_are_found_without_an_argument_for_them(kind):
    _, backend = made(kind)
    assert not backend.rule.is_movable
    assert "added to the embeddings" in str(backend.rule)


def test_a_query_is_scaled_by_its_own_position():
    model, backend = made("beam")
    ids, buffer = (torch.arange(400) % 200)[None], KVBuffer.like(backend.shapes, 400)
    for rows in (None, torch.tensor([3, 170, 398, 399])):
        with torch.inference_mode():
            expected = model(ids).logits[0, -1:]
        assert torch.allclose(backend.prefill(buffer, ids, rows).logits, expected, atol=1e-5)


def test_models_that_cache_what_they_do_not_read_are_not_batched():
    assert not made("jetmoe")[1].can_batch
    assert made("afmoe")[1].can_batch


def test_a_model_that_cannot_compute_two_tokens_is_refused(monkeypatch):
    model, _ = made("afmoe")

    def fail(*_, **__):
        raise ValueError("no state")

    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(ModelError, match=r"two tokens.*no state"):
        wrap_model(model, tiny_tokenizer(), name="m", revision="m")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Rows, "attend"),
        (batch, "_pass"),
        (modeling_llama.LlamaMLP, "forward"),
        (recording._Listening, "update"),
    ],
)
def test_memory_that_lacks_says_nothing_about_a_model(owner, name, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(owner, name, full)
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        wrap_model(llama(), tiny_tokenizer(), name="m", revision="m")


def test_memory_that_lacks_for_the_recording_does_not_either(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(probe, "record", full)
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        wrap_model(llama(), tiny_tokenizer(), name="m", revision="m")


def test_a_model_set_to_flash_attention_is_examined_by_another():
    def flash(module, query, *given, **options):
        if query.dtype == torch.float32:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        return sdpa_attention_forward(module, query, *given, **options)

    AttentionInterface.register("half_only", flash)
    AttentionMaskInterface.register("half_only", sdpa_mask)
    model = llama().bfloat16()
    model.set_attn_implementation("half_only")
    assert wrap_model(model, tiny_tokenizer(), name="m", revision="m").can_watch


class Packed(torch.nn.Parameter):
    """Stands for weights that are no numbers to compute with, as those of bitsandbytes."""


@pytest.mark.parametrize("what", ["layer", "weight"])
def test_others_layers_and_weights_are_not_joined(what):
    model = llama()
    part = model.model.layers[1].mlp.down_proj
    if what == "layer":
        part.__class__ = type("Linear4bit", (torch.nn.Linear,), {})
    else:
        part.weight = Packed(part.weight.data)
    assert lean_model(llama()) is not None
    assert lean_model(model) is None
    found = wrap_model(model, tiny_tokenizer(), name="m", revision="m")
    assert found.details["layers"] == "the model's own modules"


def test_few_bits_are_refused_where_the_model_is(monkeypatch):
    model = llama()
    monkeypatch.setattr(type(model), "device", torch.device("cuda", 0))
    with pytest.raises(ConfigError, match="needs a CPU"):
        wrap_model(model, tiny_tokenizer(), name="m", revision="m", weights="int4")


def test_frequencies_are_read_where_there_is_no_double():
    class OnMps(torch.Tensor):
        def double(self):
            raise TypeError("the MPS framework doesn't support float64")

        def cpu(self):
            return self.as_subclass(torch.Tensor)

    model = llama()
    expected = frequencies(model)
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.as_subclass(OnMps)
    assert frequencies(model) == expected


@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn", "int8", "many"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ConfigError, match="not one of float32, bfloat16, float16"):
        parse_dtype(dtype)


# What peft calls.
OLD = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def llama():
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **PLAIN)).eval()


def adapted(model):
    found = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, weight in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return found.eval()


def spread(model):
    model.lm_head.weight = type("Far", (Packed,), {"device": torch.device("cuda", 1)})(
        model.lm_head.weight.data
    )
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


@OLD
@pytest.mark.parametrize("around", [compiled, adapted])
def test_a_model_is_found_inside_of_what_was_made_of_it(around):
    whole = around(llama())
    ids = torch.tensor([list(range(3, 60))])
    with torch.inference_mode():
        own = whole(input_ids=ids, use_cache=False).logits[0, -1]
    found = wrap_model(whole, tiny_tokenizer(), name="x", revision="x")
    assert found.rule == wrap_model(llama(), tiny_tokenizer(), name="y", revision="y").rule
    assert found.can_watch
    logits = found.prefill(KVBuffer.like(found.shapes, 57), ids, None).logits[0]
    assert torch.allclose(logits, own, atol=1e-4)


def test_layers_that_choose_keys_by_an_index_are_named():
    config = AutoConfig.for_model(
        "minimax_m3_vl_text",
        **PLAIN,
        **{"head_dim": 16, "num_local_experts": 4, "index_n_heads": 2, "index_head_dim": 16},
        layer_types=["full_attention", "minimax_m3_sparse"] * 2,
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match="minimax_m3_sparse: its layers choose the keys"):
        wrap_model(model, tiny_tokenizer(), name="x", revision="x")


@OLD
@pytest.mark.parametrize(
    ("around", "says"),
    [
        (torch.nn.DataParallel, "a DataParallel, and no model of transformers"),
        (lambda model: model.double(), "float64"),
        (lambda model: model.to("meta"), "not in memory"),
        (spread, "cpu and cuda:1"),
        (
            lambda model: get_peft_model(
                model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
            ),
            "learned tokens",
        ),
    ],
    ids=["parallel", "double", "meta", "spread", "prompts"],
)
def test_what_cannot_be_computed_with_is_refused_at_once(around, says):
    with pytest.raises(ModelError, match=says):
        wrap_model(around(llama()), tiny_tokenizer(), name="x", revision="x")
