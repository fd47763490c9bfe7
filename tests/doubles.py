"""Backends for tests: one that records, and one that is nothing but arithmetic."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from cached_rag.backends.base import Prefilled
from cached_rag.errors import ModelError
from cached_rag.kv.buffer import KVBuffer


class Recording:
    """Does what another backend does, and keeps what every step was given.

    Attributes:
        steps: of each step, how many tokens each of its rows had.
        before: called with a step's rows before it is made. It may wait, or raise what fails it.
        fails: called with a step's rows; the error it fails with once it has written, or None.
    """

    def __init__(self, model, before=lambda batch: None, fails=lambda batch: None):
        self.model, self.before, self.fails = model, before, fails
        self.steps = []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def step(self, batch):
        self.steps.append([len(row.token_ids) for row in batch])
        self.before(batch)
        error, lengths = self.fails(batch), [row.kv.length for row in batch]
        logits = self.model.step(batch)
        if error is None:
            return logits
        for row, length in zip(batch, lengths, strict=True):
            row.kv.length = length
        raise error


def slow(seconds):
    """For `Recording`'s `before`: steps that take as long."""
    return lambda batch: time.sleep(seconds)


class Ends(frozenset):
    """Tokens that end an answer; calls `asked` whenever an answer has a next token."""

    asked = staticmethod(lambda: None)

    def __contains__(self, token):
        self.asked()
        return super().__contains__(token)


@dataclass
class Plain:
    """A tiny llama computed by hand, row by row, with no code of any other backend.

    It repairs by methods that choose their rows beforehand, and computes one row at a time.
    """

    llama: object
    can_watch: bool = False
    token_price: float = 1 / 6
    can_share: bool = False
    can_batch: bool = False
    can_append: bool = False
    keeps_states: bool = False
    composer: None = None
    facts: tuple = field(
        default=(
            *("name", "fingerprint", "tokenizer", "vocab_size", "context_length", "eos_ids"),
            *("repetition_penalty", "details", "shapes", "rule", "lock", "num_weights"),
        )
    )

    def __getattr__(self, name):
        if name not in self.facts:
            raise AttributeError(name)
        return getattr(self.llama, name)

    @torch.inference_mode()
    def prefill(self, buffer, token_ids, slots=None, *, num_logits=1, ready=lambda layer: None):
        model, length = self.llama.decoder.model.model, token_ids.shape[1]
        slots = torch.arange(length) if slots is None else slots
        at = torch.tensor([[buffer.position(int(slot)) for slot in slots]])
        hidden = model.embed_tokens(token_ids[:, slots])
        cos, sin = model.rotary_emb(hidden, at)
        mask = torch.arange(length)[None] <= slots[:, None]
        for index, layer in enumerate(model.layers):
            ready(index)
            own, normed = layer.self_attn, layer.input_layernorm(hidden)
            query, keys, values = (
                part(normed).unflatten(-1, (-1, own.head_dim)).transpose(1, 2)
                for part in (own.q_proj, own.k_proj, own.v_proj)
            )
            query, keys = apply_rotary_pos_emb(query, keys, cos, sin)
            buffer.keys[index][:, :, slots] = keys
            buffer.values[index][:, :, slots] = values
            seen_keys, seen_values = (
                repeat_kv(side[index][:, :, :length], own.num_key_value_groups)
                for side in (buffer.keys, buffer.values)
            )
            scores = (query @ seen_keys.transpose(2, 3)) * own.scaling
            weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
            hidden = hidden + own.o_proj((weights @ seen_values).transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        last = model.norm(hidden)[:, max(0, len(slots) - num_logits) :] if num_logits else hidden
        tail = self.llama.decoder.model.lm_head(last)
        return Prefilled(tail, len(slots) * len(model.layers), slots)

    def repair(self, prompt):
        method, layout = prompt.method, prompt.layout
        if method.check_layers(layout) or hasattr(method, "observed_layers"):
            raise ModelError(f"{type(method).__name__} is more than this backend can do")
        slots = method.first_rows(layout).nonzero().squeeze(1)
        ready = prompt.ready or (lambda layer: None)
        return self.prefill(prompt.buffer, prompt.token_ids, slots, ready=ready)

    def choose(self, *_):
        """Never asked: one row is computed at a time."""
        raise NotImplementedError

    def step(self, batch):
        found = []
        for row in batch:
            ids = torch.zeros(1, row.end, dtype=torch.int64)
            slots = torch.arange(row.kv.length, row.end)
            ids[0, slots] = torch.tensor(row.token_ids)
            done = self.prefill(row.kv.own, ids, slots, num_logits=row.num_logits)
            found.append(done.tail[0])
            row.kv.length = row.end
        return torch.cat(found)

    def forward(self, token_ids, split=None):
        buffer = KVBuffer.like(self.llama.shapes, token_ids.shape[1])
        if split:
            self.prefill(buffer, token_ids[:, :split])
            return self.prefill(buffer, token_ids, torch.arange(split, token_ids.shape[1])).logits
        return self.prefill(buffer, token_ids).logits
