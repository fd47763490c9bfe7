"""Prompts of one schema answered together: the same answers, and modules in memory once."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES, UNMOVABLE, tiny_model

from cached_rag import Engine, Import, Said, Schema
from cached_rag.assemble import KVBuffer
from cached_rag.attention import Rows
from cached_rag.batch_step import can_batch
from cached_rag.relay import Segment, SharedKV, relay_attention
from cached_rag.sharing import Pool

FAST = sorted(f for f in FAMILIES if f != "longrope" and tiny_model(f).decoder.is_fast)
LONG = " ".join(f"The {n} rooms of the house are all painted in another colour." for n in range(9))
SOURCE = f"""
<schema name="house">
  <user>
    <module name="rooms">{LONG}</module>
    <union>
      <module name="cellar">The cellar is dark and full of old bottles.</module>
      <module name="attic">The attic has a window to the north, and doves.</module>
    </union>
  </user>
</schema>
"""


def prompts(layout):
    schema = Schema.from_string(SOURCE, layout=layout)
    every = [
        schema.prompt(Import("rooms"), Import(part), Said("user", question))
        for part in ("cellar", "attic")
        for question in ("Is it dark?", "Who lives there?")
    ]
    return [*every, schema.prompt(Import("attic"), "Why?")]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *((family, "schema") for family in FAST),
        *((family, "compact") for family in FAST if family not in UNMOVABLE),
    ],
)
def test_answers_over_shared_modules_are_those_over_copies(family, layout):
    engine = Engine(tiny_model(family))
    asked = prompts(layout)
    alone = [engine.generate(prompt, method="reuse", max_tokens=8) for prompt in asked]
    together = engine.generate_batch(asked, shares_memory=True, method="reuse", max_tokens=8)
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    assert all(answer.report.shared_kv_bytes > 0 for answer in together)
    assert not any(answer.report.shared_kv_bytes for answer in alone)


def test_the_bytes_of_a_shared_module_count_once():
    engine = Engine(tiny_model("llama"))
    asked = prompts("schema")
    answers = engine.generate_batch(asked, shares_memory=True, method="reuse", max_tokens=4)
    token = engine.model.shapes.bytes_per_token
    for answer in answers:
        own, shared = answer.report.kv_bytes // token, answer.report.shared_kv_bytes // token
        assert own + shared == answer.report.prompt_tokens + 4
        assert shared == answer.report.cached_tokens
    stored = engine.library.store.nbytes
    copies = sum(answer.report.shared_kv_bytes for answer in answers)
    assert copies > 2 * stored
    # In the schema's layout nothing is moved, so what is shared is the store's own memory.
    pool = Pool(engine.model.shapes)
    unmoved = asked[:4]
    held = [pool.share(engine.prefill(p, method="reuse", max_tokens=4), 4) for p in unmoved]
    assert pool.nbytes <= stored
    assert len({id(s) for h in held for _, s in h.buffer.segments}) < sum(
        len(h.buffer.segments) for h in held
    )
    inside = {kv.data_ptr() for kv in _stored_values(engine)}
    for one in held:
        for _, segment in one.buffer.segments:
            assert segment.values.data_ptr() in inside


def _stored_values(engine):
    return [entry.values for entry in engine.library.store._entries.values()]


def test_repaired_modules_stay_a_prompts_own():
    engine = Engine(tiny_model("llama"))
    asked = prompts("compact")
    options = {"method": "cacheblend", "recompute_ratio": 1.0, "max_tokens": 6}
    alone = [engine.generate(prompt, **options) for prompt in asked]
    together = engine.generate_batch(asked, shares_memory=True, **options)
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    reused = engine.generate_batch(asked, shares_memory=True, method="reuse", max_tokens=6)
    for answer, other in zip(together, reused, strict=True):  # only what is exact
        assert 0 < answer.report.shared_kv_bytes < other.report.shared_kv_bytes


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_models_whose_attention_is_their_own_keep_copies(family):
    engine = Engine(tiny_model(family))
    assert not can_batch(engine.model)
    asked = prompts("schema")
    alone = [engine.generate(prompt, method="reuse", max_tokens=4).text for prompt in asked]
    together = engine.generate_batch(asked, shares_memory=True, method="reuse", max_tokens=4)
    assert [answer.text for answer in together] == alone
    assert not any(answer.report.shared_kv_bytes for answer in together)


@pytest.mark.parametrize("window", [None, 9, 30])
def test_relayed_attention_equals_attention_over_the_concatenation(window):
    """Twin: one softmax over all keys of a row."""
    torch.manual_seed(0)
    layers, kv_heads, heads, dim = 2, 2, 4, 16

    def run(length):
        return torch.randn(layers, kv_heads, length, dim), torch.randn(
            layers, kv_heads, length, dim
        )

    first, second = Segment(*run(20)), Segment(*run(7))
    rows, wholes = [], []
    for own_count, segments in ((5, (first, second)), (3, (first,)), (6, (second,))):
        own = KVBuffer(*(t[:, None] for t in run(own_count)))
        begins, at = [], 0
        for segment in segments:
            begins.append((at, segment))
            at += segment.keys.shape[2]
        rows.append(SharedKV(begins, own, range(at, at + own_count), None))
        keys = torch.cat([*(s.keys for s in segments), own.keys[:, 0]], dim=2)
        values = torch.cat([*(s.values for s in segments), own.values[:, 0]], dim=2)
        wholes.append((keys, values))
    query = torch.randn(3, heads, 1, dim)
    relayed = relay_attention(query, rows, 1, None, window)
    for index, (keys, values) in enumerate(wholes):
        length = keys.shape[2]
        last = Rows(torch.tensor([length - 1]), length)
        plain = last.attend(query[index : index + 1], keys[None, 1], values[None, 1], None, window)
        assert torch.allclose(relayed[index], plain[0], atol=1e-5)
    wrong = relay_attention(query, rows[::-1], 1, None, window)
    assert not torch.allclose(wrong, relayed, atol=1e-3)
