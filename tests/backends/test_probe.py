"""The examination of models at load: rounding passes, at every size and dtype; faults do not."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from conftest import FAMILIES
from transformers import AutoConfig, AutoModelForCausalLM

from cached_rag.backends.transformers import attention, probe
from cached_rag.backends.transformers.attention import Rows
from cached_rag.backends.transformers.row_cache import RowCache
from cached_rag.errors import ModelError

DTYPES = ("float32", "bfloat16", "float16")
_SMALL = {"vocab_size": 240, "num_hidden_layers": 2}
# True widths and windows; few layers, heads or dimensions.
SHAPES = {
    "0.5B": ("qwen2", (896, 4864, 14, 2), {}),
    "1.5B": ("qwen2", (1536, 8960, 12, 2), {}),
    "70B": ("llama", (8192, 1024, 16, 2), {"num_hidden_layers": 1, "head_dim": 128}),
    "window": ("mistral", (896, 2048, 14, 2), {"sliding_window": 4096}),
    "80 layers": ("llama", (64, 128, 4, 2), {"num_hidden_layers": 80}),
    "80 layers, windows": (
        "gemma3_text",
        (64, 128, 4, 2),
        {"num_hidden_layers": 80, "head_dim": 16, "sliding_window": 512},
    ),
}
# All dtypes where there is little to compute, else what such models come in: what is wide or deep
# is computed in fp32 as all else is.
SHAPED = [
    *((name, dtype) for name in ("0.5B", "window") for dtype in DTYPES),
    *((name, "bfloat16") for name in ("1.5B", "70B", "80 layers", "80 layers, windows")),
]


@functools.cache
def shaped(name):
    """A random model with a few channels a thousand times as large as the others."""
    kind, (width, inner, heads, kv_heads), more = SHAPES[name]
    sizes = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(_SMALL | sizes | more))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[:, ::97] *= 1000
        for name, bias in model.named_parameters():
            if name.endswith("k_proj.bias"):
                bias.normal_(0, 50)
    return model


@functools.cache
def family(name, dtype="float32"):
    kind, sizes = FAMILIES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model.to(getattr(torch, dtype))


@functools.cache
def examined(name):
    return probe.examine(family(name))


def seen_by(model):
    """What was found out about a model, and the recording of its own pass."""
    found = probe.examine(model)
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    dense = replace(found.decoder, is_fast=False)
    narrow = probe._narrow_windows(model)
    with torch.no_grad(), probe.in_float32(dense), narrow:
        seen = probe._recorded(dense, probe._delta(dense))
    model.set_attn_implementation(own)
    return found, seen


def error_of(model):
    """What was found out about a model, and the error of its partial prefill."""
    found, seen = seen_by(model)
    return found, probe.deviation(found.decoder, seen)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_accepted_in_every_dtype(name, dtype):
    exact = examined(name)
    found, error = error_of(family(name, dtype))
    assert error < probe.TOLERANCE / 10
    assert found.decoder.is_fast == exact.decoder.is_fast
    assert str(found.rule) == str(exact.rule)
    assert found.shapes.dtype == getattr(torch, dtype)


@pytest.mark.parametrize(("name", "dtype"), SHAPED)
def test_width_depth_and_outliers_are_no_fault(name, dtype):
    model = shaped(name).to(getattr(torch, dtype))
    before = [parameter.data_ptr() for parameter in model.parameters()]
    found, error = error_of(model)
    assert found.decoder.is_fast
    assert found.rule.is_movable
    assert error < probe.TOLERANCE / 10
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


# Rows of name and dtype: a small one in each dtype, and those of another depth, width or window.
SMALL = [("llama", dtype) for dtype in DTYPES]
FAULTY = [*SMALL, *((name, "bfloat16") for name in ("80 layers", "1.5B", "window"))]
WINDOWED = [
    *(("gemma3", dtype) for dtype in DTYPES),
    *((name, "bfloat16") for name in ("window", "80 layers, windows", "mistral")),
]


def model_of(name, dtype):
    model = family(name) if name in FAMILIES else shaped(name)
    return model.to(getattr(torch, dtype))


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize(("name", "dtype"), FAULTY)
def test_masks_that_are_off_by_one_stand_out(name, dtype, shift, monkeypatch):
    found, seen = seen_by(model_of(name, dtype))
    decoder = found.decoder
    assert probe.deviation(decoder, seen)[0] < probe.TOLERANCE / 10
    mask = Rows._mask

    def shifted(self, *how):
        return mask(Rows((self.slots + shift).clamp(0, self.length - 1), self.length), *how)

    monkeypatch.setattr(Rows, "_mask", shifted)
    assert probe.deviation(decoder, seen)[0] > probe.TOLERANCE * 10


@pytest.mark.parametrize("name", ["gpt_oss", "llama4"])
def test_a_missing_sink_and_a_chunk_taken_for_a_window_stand_out(name, monkeypatch):
    found, seen = seen_by(model_of(name, "float32"))
    assert probe.deviation(found.decoder, seen)[0] < probe.TOLERANCE / 10
    scoring = attention.Scoring

    def wrong(scale, window, softcap, sinks):
        return scoring(scale, window and int(window), softcap)

    monkeypatch.setattr(attention, "Scoring", wrong)
    assert probe.deviation(found.decoder, seen)[0] > probe.TOLERANCE * 10


def test_queries_scaled_as_if_all_rows_followed_each_other_stand_out(monkeypatch):
    found, seen = seen_by(model_of("llama4", "float32"))
    length = RowCache.get_seq_length
    monkeypatch.setattr(RowCache, "get_seq_length", lambda self, layer_idx=None: length(self))
    assert probe.deviation(found.decoder, seen)[0] > probe.TOLERANCE * 10


@pytest.mark.parametrize(("name", "dtype"), WINDOWED)
def test_one_layers_window_ignored_stands_out(name, dtype):
    found, seen = seen_by(model_of(name, dtype))
    decoder = found.decoder
    layer = max(i for i, window in enumerate(decoder.windows) if window)
    layers = list(decoder.layers)
    layers[layer] = replace(layers[layer], window=None)
    error, where = probe.deviation(replace(decoder, layers=tuple(layers)), seen)
    assert error > probe.TOLERANCE * 10
    assert f"layer {layer}" in where


@pytest.mark.parametrize(("name", "dtype"), FAULTY[:-1])
def test_wrong_frequencies_stand_out(name, dtype, monkeypatch):
    model = model_of(name, dtype)
    true = probe.frequencies(model)
    for base in (1.02, 0.98):  # of theta, what raising it by so much makes of a frequency
        wrong = [tuple(f * base ** (i / len(fs)) for i, f in enumerate(fs)) for fs in true]
        monkeypatch.setattr(probe, "frequencies", lambda _, wrong=wrong: wrong)
        assert "no known rotation" in probe.examine(model).rule.reason


class Recurrent(torch.nn.Module):
    """A layer that also hands every token the mean of those before it."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.layer_idx = layer, layer.self_attn.layer_idx

    def forward(self, hidden_states, **options):
        counts = torch.arange(1, hidden_states.shape[1] + 1)[:, None]
        mean = hidden_states.cumsum(1) / counts
        return self.layer(hidden_states, **options) + 0.1 * mean.to(hidden_states.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_with_a_state_are_refused_and_named(dtype):
    sizes = FAMILIES["llama"][1]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
    model.model.layers[2] = Recurrent(model.model.layers[2])
    with pytest.raises(ModelError, match="layer 2 differs"):
        probe.examine(model.to(getattr(torch, dtype)).eval())


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_that_share_a_cache_are_refused(dtype):
    sizes = FAMILIES["llama"][1]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
    model.model.layers[2].self_attn.layer_idx = 1
    with pytest.raises(ModelError):
        probe.examine(model.to(getattr(torch, dtype)).eval())


def test_windows_in_tables_of_masks_are_refused():
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 240}
    config = AutoConfig.for_model("gpt_neo", attention_types=[[["global", "local"], 1]], **sizes)
    with pytest.raises(ModelError, match="windows by tables"):
        probe.examine(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    ("name", "sees"),
    [("gemma3", {"use_bidirectional_attention": True}), ("qwen3", {"is_causal": False})],
)
def test_tokens_that_see_later_ones_are_refused(name, sees):
    kind, sizes = FAMILIES[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **sees))
    with pytest.raises(ModelError, match="tokens see later ones"):
        probe.examine(model.eval())
