"""Modules in a buffer, by hand: what tests of backends and methods begin with."""

from __future__ import annotations

from dataclasses import replace

import torch
from conftest import RELOCATABLE, random_ids, tiny_model

from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.layers import stacks_of
from cached_rag.library.encode import encode_chunks
from cached_rag.methods import Layout

TOLERANCE = 1e-4


PREFIX, MODULE, QUESTION = 5, 20, 6


def garbage(model, length):
    buffer = KVBuffer.like(model.shapes, length)
    for stack in (*stacks_of(buffer.keys), *stacks_of(buffer.values)):
        stack.uniform_(-3, 3)
    return buffer


def layout_of(model, length, reused=(), exact=()):
    live = torch.ones(length, dtype=torch.bool)
    lossless = torch.zeros(length, dtype=torch.bool)
    for begin, end in (*reused, *exact):
        live[begin:end] = False
    for begin, end in exact:
        lossless[begin:end] = True
    shapes = model.shapes
    attending = shapes.first_attending
    return Layout(live, lossless, tuple(reused), shapes.num_layers, first_attending=attending)


def three_modules(model):
    """Prefix, three modules encoded behind it, a question; and all their ids."""
    prefix_ids, question = random_ids(PREFIX, 1), random_ids(QUESTION, 2)
    modules = [tuple(random_ids(MODULE, seed)) for seed in (3, 4, 5)]
    (prefix,) = encode_chunks(model, [None], [tuple(prefix_ids)])
    by_ids = {kv.token_ids: kv for kv in encode_chunks(model, [prefix], modules)}
    ids = [*prefix_ids, *(t for m in modules for t in m), *question]
    return prefix, [by_ids[m] for m in modules], ids


WATCHED = [name for name in RELOCATABLE if tiny_model(name).decoder.is_fast]


def assembled(family):
    """A tiny model, its three modules assembled behind a prefix, and the prompt."""
    model = tiny_model(family)
    prefix, modules, ids = three_modules(model)
    buffer = garbage(model, len(ids))
    buffer.place(prefix, 0, model.rule)
    for i, module in enumerate(modules):
        buffer.place(module, PREFIX + i * MODULE, model.rule)
    layout = layout_of(model, len(ids), exact=[(0, PREFIX)], reused=_spans())
    return model, buffer, torch.tensor([ids]), replace(layout, ids=torch.tensor(ids))


def _spans():
    return [(PREFIX + i * MODULE, PREFIX + (i + 1) * MODULE) for i in range(3)]


def copy(buffer):
    return KVBuffer(buffer.keys.clone(), buffer.values.clone())
