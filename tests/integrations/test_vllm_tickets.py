"""What a request carries to vLLM's connector, the connector's settings, and where tokens stand."""

from __future__ import annotations

import pytest
from vllm_cached_rag.agreed import Load, Settings, Ticket, layers_in_order, ticket_of, whole_blocks
from vllm_cached_rag.node import prompt_of

from cached_rag import ConfigError

NAME = "0123456789abcdef" * 2
GOOD = {"handoff": "/kv", "fingerprint": "f", "dtype": "bfloat16", "num_layers": 4}
ASKED = {"messages": [{"role": "user", "content": "Why?"}]}


def test_a_ticket_survives_the_way_to_vllm():
    fields = Ticket(NAME).fields([5, 6])
    assert fields["kv_transfer_params"].pop("prompt_token_ids") == [5, 6]  # as vLLM does
    assert ticket_of(fields["kv_transfer_params"], fields["cache_salt"]) == Ticket(NAME)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}])
def test_requests_of_others_have_no_ticket(params):
    assert ticket_of(params, "salt") is None


@pytest.mark.parametrize("salt", [None, "", "another", Ticket("f" * 32).salt])
def test_kv_is_refused_without_the_salt_that_keeps_it_from_others(salt):
    assert "cache_salt" in ticket_of({"cached_rag": {"prompt": NAME}}, salt)


@pytest.mark.parametrize(
    "ours", [{}, "x", 1, {"prompt": 1}, {"prompt": "../" * 8}, {"prompt": NAME.upper()}]
)
def test_a_malformed_ticket_is_said_to_be_so(ours):
    assert "prefill node" in ticket_of({"cached_rag": ours}, f"cached-rag-{NAME}")


@pytest.mark.parametrize(("begin", "end"), [(0, 12), (4, 12), (4, 11), (5, 8)])
def test_slots_are_those_of_the_tokens_blocks(begin, end):
    size, ids = 4, (9, 2, 7)
    load = Load(NAME, tuple(range(20)), begin, end, ids)
    paged = [block * size + row for block in ids for row in range(size)]  # slot of every token
    assert load.slots(size) == paged[begin:end]
    assert load.blocks(size) == {slot // size for slot in paged[begin:end]}


@pytest.mark.parametrize(("tokens", "whole"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_block_is_left_to_vllm(tokens, whole):
    assert whole_blocks(tokens, 4) == whole


def test_layers_are_ordered_by_number_and_not_by_name():
    names = [f"model.layers.{number}.self_attn.attn" for number in (10, 2, 0, 1, *range(3, 10))]
    assert layers_in_order(names) == [f"model.layers.{n}.self_attn.attn" for n in range(11)]


@pytest.mark.parametrize("names", [["a.1.b", "a.2.b"], ["a.0.b", "c.0.d"], ["a.0.b.1"], ["a"]])
def test_layers_that_cannot_be_told_apart_are_refused(names):
    with pytest.raises(ValueError, match="layer"):
        layers_in_order(names)


def test_settings_are_what_describe_prints():
    config = Settings(**GOOD).transfer_config()
    assert Settings.of(config["kv_connector_extra_config"]) == Settings(**GOOD)
    assert config["kv_load_failure_policy"] == "recompute"


@pytest.mark.parametrize(
    "change", [{"handof": "x"}, {"handoff": ""}, {"num_layers": 0}, {"num_layers": "4"}]
)
def test_wrong_settings_are_refused(change):
    with pytest.raises(ConfigError, match="describe"):
        Settings.of(GOOD | change)


@pytest.mark.parametrize(
    "change", [{"devices": 2}, {"policy": "fail"}, {"dtype": "float16"}], ids=range(3)
)
def test_a_vllm_that_cannot_take_this_kv_does_not_start(change):
    vllm = {"devices": 1, "policy": "recompute", "dtype": "bfloat16"}
    Settings(**GOOD).check_vllm(**vllm)
    with pytest.raises(ConfigError):
        Settings(**GOOD).check_vllm(**(vllm | change))


def test_plain_prompts_are_prefilled():
    part = {"type": "text", "text": "Why?"}
    assert prompt_of(ASKED) == ASKED["messages"]
    assert prompt_of({"messages": [{"role": "user", "content": [part]}]}) == ASKED["messages"]
    assert prompt_of({"prompt": "Once", "tools": None, "add_special_tokens": True}) == "Once"
    usual = {"add_generation_prompt": True, "add_special_tokens": False, "echo": False}
    named = [ASKED["messages"][0] | {"name": "Ann"}]  # which templates may show
    assert prompt_of(usual | {"messages": [named[0] | {"tool_calls": None}]}) == named


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": [1, 2]},
        {"prompt": ["a", "b"]},
        {"prompt": ""},
        {"prompt": "a", **ASKED},
        ASKED | {"tools": [{"type": "function"}]},
        ASKED | {"chat_template": "x"},
        ASKED | {"tools": []},
        ASKED | {"add_generation_prompt": False},
        ASKED | {"add_generation_prompt": 0},
        ASKED | {"add_special_tokens": True},
        ASKED | {"prompt_logprobs": 0},
        {"prompt": "a", "add_special_tokens": False},
        ASKED | {"kv_transfer_params": {"cached_rag": {"prompt": NAME}}},
        {"messages": ["x"]},
        {"messages": [{"role": "user", "content": "x", "name": 1}]},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": []}]},
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    ],
    ids=range(20),
)
def test_what_only_vllm_renders_is_left_to_it(body):
    assert prompt_of(body) is None
