"""Models that see images: their text half is loaded by itself, and computes what it did there."""

from __future__ import annotations

import json
import re

import pytest
import torch
from conftest import VOCAB, random_ids, tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText

from cached_rag import Engine, load_model, wrap_model
from cached_rag.backends.transformers.complete import load_complete, text_half
from cached_rag.errors import ConfigError, ModelError

_TEXT = {
    **{"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0},
    **{"max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1},
}
_IMAGES = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "image_size": 28},
    **{"num_attention_heads": 2, "num_heads": 2, "patch_size": 14, "depth": 2},
    "out_hidden_size": 64,
}
FAMILIES = {
    "gemma3": {},
    "gemma4": {
        **{"global_head_dim": 32, "hidden_size_per_layer_input": 16},
        "vocab_size_per_layer_input": VOCAB,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_5": {
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    },
    "mistral3": {},
    "smolvlm": {},
    "lfm2_vl": {"layer_types": ["conv", "full_attention"] * 2},
}


def whole(family):
    """A tiny model with both halves."""
    kind = CONFIG_MAPPING[family]
    plain = AutoConfig.for_model(family)
    text = type(plain.get_text_config())(**(_TEXT | FAMILIES[family]))
    vision = plain.vision_config or CONFIG_MAPPING[f"{family}_vision"]()
    sizes = {name: size for name, size in _IMAGES.items() if hasattr(vision, name)}
    config = kind(text_config=text.to_dict(), vision_config=type(vision)(**sizes).to_dict())
    for name in ("image_token_id", "image_token_index", "video_token_id"):
        if hasattr(config, name):
            setattr(config, name, 3)
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_half_is_loaded_by_the_folder_and_nothing_else(family, tmp_path):
    model = whole(family)
    model.save_pretrained(tmp_path)
    ids = torch.tensor([random_ids(30, 5)])
    config = text_half(AutoConfig.from_pretrained(tmp_path))
    found = load_complete(str(tmp_path), family, config, dtype=torch.float32).eval()
    with torch.inference_mode():
        own, alone = (one(input_ids=ids).logits[:, -1] for one in (model, found))
    assert torch.allclose(alone, own, atol=1e-4)
    assert found.num_parameters() < model.num_parameters()


def test_a_folder_with_both_halves_is_a_model_like_any(tmp_path):
    whole("gemma3").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype="float32")
    assert model.can_watch
    assert type(model.decoder.model).__name__ == "Gemma3ForCausalLM"


def test_layers_are_those_of_text_where_images_have_as_many():
    model = whole("gemma3")
    vision = model.config.vision_config
    vision.num_hidden_layers = model.config.text_config.num_hidden_layers
    model = AutoModelForImageTextToText.from_config(model.config).eval()
    assert wrap_model(model, tiny_tokenizer(), name="x", revision="x").can_watch


def in_fp8(folder):
    """Write a folder's linear layers in fp8, with scales, as models are published."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if re.search(r"layers.*_proj\.weight$", name)]:
        blocks = weights[name].unflatten(0, (-1, 32)).unflatten(2, (-1, 32)) * 20
        scales = blocks.abs().amax((1, 3)) / 448
        levels = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)
        weights |= {name: levels.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("has_text_half", [True, False])
def test_fp8_becomes_dense_on_a_recent_gpu_and_scales_are_not_left_out(
    has_text_half, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    made = whole("gemma3") if has_text_half else tiny_model.__wrapped__("llama").decoder.model
    made.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    dense = load_model(str(tmp_path), dtype="float32", device="cpu")
    in_fp8(tmp_path)
    with pytest.raises(ModelError, match=r"weight_scale_inv.* configuration does not explain"):
        load_model(str(tmp_path), device="cpu")
    facts = json.loads((tmp_path / "config.json").read_text())
    facts["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    found = load_model(str(tmp_path), dtype="float32", device="cpu")
    part = "model.layers.0.mlp.up_proj"
    own, weight = (one.decoder.model.get_submodule(part).weight for one in (dense, found))
    assert torch.allclose(weight, 20 * own, rtol=0.07, atol=0.01)


def test_an_image_in_a_message_is_refused(engine: Engine):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}]
    with pytest.raises(ConfigError, match="text"):
        engine.generate(messages, max_tokens=1)
