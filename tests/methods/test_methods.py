"""Every method: which rows it takes, and that the rows it takes are computed right."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from conftest import alike, plain_logits, random_ids, tiny_model
from modules import TOLERANCE, WATCHED, assembled, copy, garbage

from cached_rag import ConfigError, GenerationConfig
from cached_rag.backends.base import RepairInput
from cached_rag.backends.transformers.attention import Rows
from cached_rag.backends.transformers.row_cache import Drift
from cached_rag.kv.buffer import KVBuffer
from cached_rag.methods import (
    SELECTORS,
    AnchorFlow,
    Auto,
    CacheBlend,
    Epic,
    Fast,
    InfoFlow,
    Layout,
    Lexical,
    Prefix,
    ProphetKV,
    Random,
    Reuse,
    parse_method,
    spelled,
)
from cached_rag.methods.base import LayerCheck, Selector
from cached_rag.methods.parse import UnionSelector, takes_ratio

RATIOED = sorted(set(SELECTORS) - {"reuse", "full", "prefix", "compose"})


@dataclass(frozen=True)
class Chosen(Selector):
    """The slow twin: the rows another method chose, computed in one pass from layer 0."""

    name: ClassVar[str] = "chosen"

    rows: torch.Tensor
    transfers_drift: bool = False

    def first_rows(self, layout):
        return layout.fresh | self.rows


def small_layout(layers=4):
    live = torch.zeros(40, dtype=torch.bool)
    live[[16, 27]] = live[34:] = True
    exact = torch.arange(40) < 6
    ids = torch.arange(40) % 9
    return Layout(live, exact, ((6, 16), (17, 27), (28, 34)), layers, ids=ids)


@pytest.mark.parametrize("name", RATIOED)
def test_r_1_equals_full_prefill_and_r_0_is_reuse(name):
    model, buffer, tokens, layout = assembled("llama")
    plain = plain_logits(model, tokens[0].tolist())[-1]

    def logits(selector):
        return model.repair(RepairInput(copy(buffer), tokens, layout, selector)).logits[0]

    whole, nothing = (parse_method(name, SELECTORS, r) for r in (1.0, 0.0))
    assert torch.allclose(logits(whole), plain, atol=TOLERANCE)
    assert not torch.allclose(logits(nothing), plain, atol=1e-2)
    if name in ("anchorflow", "auto", "fast"):
        anchors = Chosen(Epic(8).first_rows(layout), transfers_drift=True)
        assert torch.equal(logits(nothing), logits(anchors))
    elif name != "cacheblend":  # which recomputes its first layers whatever the ratio
        assert torch.equal(logits(nothing), logits(Reuse()))


@pytest.mark.parametrize("family", WATCHED)
@pytest.mark.parametrize(
    "selector", [ProphetKV(0.2), InfoFlow(0.2), AnchorFlow(0.1, anchor_tokens=3)], ids=repr
)
def test_what_the_question_pass_computed_is_used_again_without_harm(family, selector):
    """Twin: the same rows in a single pass from layer 0, all of them."""
    model, buffer, tokens, layout = assembled(family)
    seen = []

    class Recording(type(selector)):
        def choose(self, scores, layout):
            seen.append(super().choose(scores, layout))
            return seen[0]

    recording = Recording(**dataclasses.asdict(selector))
    ours, twin = copy(buffer), copy(buffer)
    done = model.repair(RepairInput(ours, tokens, layout, recording))
    once = Chosen(seen[0], selector.transfers_drift)
    plain = model.repair(RepairInput(twin, tokens, layout, once))
    assert torch.allclose(done.logits, plain.logits, atol=TOLERANCE)
    assert alike(ours.keys, twin.keys)
    assert alike(ours.values, twin.values)
    stale = model.repair(RepairInput(copy(buffer), tokens, layout, Reuse()))
    if model.decoder.windows[0] is None:  # control; tiny windows end before what was repaired
        assert not torch.allclose(done.logits, stale.logits, atol=1e-3)


def test_the_question_pass_is_charged():
    model, buffer, tokens, layout = assembled("llama")
    live, layers = int(layout.fresh.sum()), layout.num_layers
    chosen = int(0.2 * int(layout.reused.sum()))
    done = model.repair(RepairInput(copy(buffer), tokens, layout, ProphetKV(0.2)))
    assert done.computed == (live + live + chosen) * layers
    first_only = parse_method("a3", SELECTORS, 0.2)
    done = model.repair(RepairInput(copy(buffer), tokens, layout, first_only))
    assert done.computed == live + (live + chosen) * layers


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "qwen3"])
def test_observed_weights_are_the_models_own(family):
    """Twin: the attention weights that the model itself returns in eager mode, all fresh."""
    model = tiny_model(family)
    ids, question = random_ids(90, seed=5), 70
    tokens = torch.tensor([ids])
    live = torch.arange(90) >= question
    layout = Layout(live, torch.zeros(90, dtype=torch.bool), ((0, question),), 4)
    shown = []

    class Showing(ProphetKV):
        def score(self, weights):
            shown.append(weights)
            return super().score(weights)

    buffer = KVBuffer.like(model.shapes, 90)
    model.prefill(buffer, tokens)
    model.repair(RepairInput(buffer, tokens, layout, Showing(0.5)))
    model.decoder.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            own = model.decoder.model(tokens, output_attentions=True).attentions
    finally:
        model.decoder.model.set_attn_implementation("cached_rag")
    assert len(shown) == len(own) == 4
    for ours, theirs in zip(shown, own, strict=True):
        assert torch.allclose(ours, theirs[0, :, question:].mean(dim=0), atol=1e-5)
        assert torch.allclose(ours.sum(dim=1), torch.ones(20), atol=1e-5)


def test_rows_say_what_was_computed_in_every_layer():
    model, buffer, tokens, layout = assembled("llama")
    for selector, chosen in ((Reuse(), 0), (ProphetKV(0.2), 12), (CacheBlend(0.2), 12)):
        rows = model.repair(RepairInput(copy(buffer), tokens, layout, selector)).rows
        assert int(layout.reused[rows].sum()) == chosen
        assert set(layout.fresh.nonzero().flatten().tolist()) <= set(rows.tolist())
        assert not bool(layout.exact[rows].any())


def test_models_that_cannot_be_watched_are_refused_by_name():
    model, buffer, tokens, layout = assembled("falcon")
    assert not model.decoder.is_fast
    with pytest.raises(ConfigError, match="cannot be watched"):
        model.repair(RepairInput(buffer, tokens, layout, ProphetKV(0.2)))


@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_live_rows_are_always_computed_and_exact_ones_never(name):
    layout = small_layout()
    ratio = 0.3 if takes_ratio(name, SELECTORS) else None
    rows = parse_method(name, SELECTORS, ratio).first_rows(layout)
    assert bool((rows | ~layout.fresh).all())
    assert not bool((rows & layout.exact).any())


def test_epic_takes_the_first_tokens_of_every_module():
    layout = small_layout()
    rows = (Epic(3).first_rows(layout) & layout.reused).nonzero().flatten().tolist()
    assert rows == [6, 7, 8, 17, 18, 19, 28, 29, 30]
    assert int((Epic(recompute_ratio=0.5).first_rows(layout) & layout.reused).sum()) == 13


def test_random_is_the_same_every_time_and_differs_by_seed():
    layout = small_layout()
    first = Random(0.5).first_rows(layout)
    assert torch.equal(first, Random(0.5).first_rows(layout))
    assert not torch.equal(first, Random(0.5, seed=1).first_rows(layout))
    assert int((first & layout.reused).sum()) == 13


def test_question_methods_take_the_highest_scores():
    layout = small_layout()
    scores = torch.zeros(2, 40)
    scores[0, 8], scores[1, 30], scores[:, 3], scores[:, 35] = 1.0, 2.0, 9.0, 9.0
    chosen = ProphetKV(2 / 26).choose(scores, layout)
    assert chosen.nonzero().flatten().tolist() == [8, 30]  # neither exact nor live rows


def test_infoflow_looks_at_late_layers_and_takes_the_norm():
    assert InfoFlow(0.2).observed_layers(small_layout(10)) == (5, 6, 7, 8, 9)
    assert InfoFlow(0.2, depth=0.8).observed_layers(small_layout(10)) == (8, 9)
    weights = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    assert torch.allclose(InfoFlow(0.2).score(weights), 2**0.5 * weights[0])


def test_auto_does_not_ask_where_much_of_the_prompt_is_live():
    def asks(live, length, method=Auto, *, is_head=False):
        places = torch.arange(length)
        fresh = places < live if is_head else places >= length - live
        modules = ((live, length) if is_head else (0, length - live),)
        return bool(method().observed_layers(Layout(fresh, torch.zeros_like(fresh), modules, 4)))

    assert asks(250, 1000)
    assert not asks(251, 1000)
    assert asks(128, 200)  # few tokens are soon computed again
    assert not asks(129, 200)
    assert asks(
        600, 1000, is_head=True
    )  # a head is not computed again, and may be another prompt's KV
    assert asks(251, 1000, AnchorFlow)  # asked for by its name, it does as it says
    assert not asks(251, 1000, Fast)
    few = Layout(torch.arange(400) >= 100, torch.zeros(400, dtype=torch.bool), ((0, 100),), 4)
    assert torch.equal(Auto().first_rows(few), Epic(8).first_rows(few))


def test_fast_chooses_a_tenth_of_what_auto_does():
    fresh = torch.arange(1020) >= 1000
    layout = Layout(fresh, torch.zeros_like(fresh), ((0, 1000),), 4)
    assert (Fast().budget(layout), Auto().budget(layout)) == (30, 300)
    assert (spelled(Fast()), spelled(Auto(0.2))) == ("fast", "auto:recompute_ratio=0.2")


def entries(count):
    """A layout of reused entries that differ in two of 24 tokens, and a question of ten."""
    shape, drawn = torch.arange(24), torch.Generator().manual_seed(0)
    each = shape.repeat(count, 1)
    each[:, [8, 16]] = torch.randint(1000, 9000, (count, 2), generator=drawn)
    ids = torch.cat([each.flatten(), torch.arange(10)])
    fresh = torch.arange(len(ids)) >= len(ids) - 10
    return Layout(fresh, torch.zeros_like(fresh), ((0, len(ids) - 10),), 4, ids=ids)


def prose(count):
    """As `entries`, of tokens that come in no order."""
    like = entries(count)
    return dataclasses.replace(like, ids=torch.randperm(len(like.ids)) % 997)


def test_entries_are_alike_and_neither_prose_nor_copies_of_it_are():
    assert entries(20).is_alike
    assert entries(100).is_alike
    assert not prose(20).is_alike
    assert not prose(100).is_alike
    text = prose(40).ids
    for copies in (2, 3):
        whole = text.repeat(copies)
        fresh = torch.arange(len(whole)) >= len(whole) - 10
        again = Layout(fresh, torch.zeros_like(fresh), ((0, 10),), 4, ids=whole)
        assert not again.is_alike
    overlapping = text.unfold(0, 40, 30).flatten()  # chunks of 40 tokens, 10 of them the next one's
    fresh = torch.arange(len(overlapping)) >= len(overlapping) - 10
    assert not Layout(fresh, torch.zeros_like(fresh), ((0, 10),), 4, ids=overlapping).is_alike
    same = torch.zeros(100, dtype=torch.int64)
    assert not dataclasses.replace(entries(20), ids=same).is_alike  # a word again and again
    assert not dataclasses.replace(entries(20), ids=same[:0]).is_alike


def keys(count):
    """As `entries`, of keys of seven characters, and what stands between them."""
    like = entries(count)
    drawn = torch.randint(16, (len(like.ids),), generator=torch.Generator().manual_seed(0))
    drawn[torch.arange(len(drawn)) % 8 == 7] = 16
    return dataclasses.replace(like, ids=drawn)


def test_keys_and_numbers_are_alike_by_themselves_and_take_more():
    assert all(keys(count).is_alike and keys(count).is_spelled for count in (20, 100))
    assert not any(one.is_spelled for one in (prose(20), prose(100)))
    for count, share in ((10, 0.3), (20, 0.48), (30, 0.72), (40, 1.0)):
        assert Auto().share(keys(count)) == pytest.approx(share)
        assert Fast().share(keys(count)) == 0.03
    again = keys(20).ids[:48].repeat(20)  # the same few keys in each chunk are copies
    fresh = torch.arange(len(again)) >= len(again) - 10
    copies = Layout(fresh, torch.zeros_like(fresh), ((0, 10),), 4, ids=again)
    assert not copies.is_alike


def test_auto_repairs_more_the_more_entries_are_alike_and_fast_does_not():
    for count, share in ((20, 0.3), (40, 0.48), (60, 0.72), (70, 1.0), (100, 1.0)):
        layout = entries(count)
        reused = int(layout.reused.sum())
        assert Auto().budget(layout) == pytest.approx(share * reused, abs=1)
        assert Fast().budget(layout) == int(0.03 * reused)
        assert Auto().budget(prose(count)) == int(0.3 * reused)
        assert bool(Auto().observed_layers(layout)) == (share < 1)  # nothing is left to choose
        assert bool((Auto().first_rows(layout) == ~layout.exact).all()) == (share == 1)
    half = dataclasses.replace(entries(20), settled=((0, 480),))
    assert Auto().budget(half) == 144  # of documents, too


def test_all_is_all_of_chunks_that_need_less_repair_too():
    settled = dataclasses.replace(prose(20), settled=((0, 240),))
    whole = Auto(recompute_ratio=1.0)
    assert whole.budget(settled) == 480 > Auto().budget(prose(20)) > Auto().budget(settled)
    assert bool((whole.first_rows(settled) == ~settled.exact).all())
    assert not whole.observed_layers(settled)


@pytest.mark.parametrize("made", [entries, keys])
def test_small_models_compute_all_of_alike_entries(made, monkeypatch):
    monkeypatch.setattr(Auto, "least_weights", 1e9)
    small, large = (dataclasses.replace(made(20), num_weights=n) for n in (494e6, 1e9))
    assert Auto().share(small) == 1.0
    assert bool((Auto().first_rows(small) == ~small.exact).all())
    assert not Auto().observed_layers(small)
    assert Auto().share(large) == Auto().share(made(20)) < 1
    assert Auto().share(dataclasses.replace(prose(20), num_weights=494e6)) == 0.3
    assert Fast().share(small) == 0.03


def test_small_models_compute_all_of_few_tokens(monkeypatch):
    monkeypatch.setattr(Auto, "least_weights", 1e9)
    few, more = (dataclasses.replace(prose(n), num_weights=494e6) for n in (12, 13))
    assert Auto().share(few) == 1.0 > Auto().share(more) == 0.3
    assert Auto().share(prose(12)) == 0.3
    assert Fast().share(few) == 0.03


def test_small_models_compute_all_of_short_prompts_of_which_less_is_alike(monkeypatch):
    monkeypatch.setattr(Auto, "least_weights", 1e9)

    def share(weights, count=20, every=1):
        """Of entries of 24 tokens, of which some have seven in common."""
        like = entries(count)
        each = torch.arange(10, len(like.ids)).view(count, 24)
        each[::every, :7] = torch.arange(7)
        made = dataclasses.replace(
            like, ids=torch.cat([each.flatten(), like.ids[-10:]]), num_weights=weights
        )
        assert made.repeating == pytest.approx(7 / 24 / every)
        assert not made.is_alike
        return Auto().share(made)

    assert share(494e6) == share(494e6, 41) == 1.0
    assert share(494e6, 42) == share(494e6, every=2) == share(1e9) == 0.3


def test_auto_follows_answers_from_alike_entries_and_no_others():
    assert [Auto().followed(one) for one in (entries(20), keys(20), prose(20))] == [4, 4, 0]
    assert [Auto(follow_tokens=7).followed(one) for one in (entries(20), prose(20))] == [7, 7]
    assert Fast().followed(entries(20)) == 0
    assert AnchorFlow().followed(entries(20)) == 0


def test_auto_computes_all_where_asking_and_repairing_would_cost_more():
    layout = entries(40)
    assert Auto().share(layout) == pytest.approx(0.48)
    many = torch.cat([layout.fresh, torch.ones(300, dtype=torch.bool)])
    ids = torch.cat([layout.ids, torch.randperm(300)])
    asked = dataclasses.replace(layout, fresh=many, exact=torch.zeros_like(many), ids=ids)
    assert Auto().share(asked) == 1.0
    assert Auto().observed_layers(asked) == ()


def test_a_union_takes_what_any_member_takes():
    layout = small_layout()
    union = parse_method("epic:anchor_tokens=1+prophetkv:recompute_ratio=0.04", SELECTORS)
    scores = torch.zeros(4, 40)
    scores[:, 22] = 1.0
    assert union.observed_layers(layout) == (0, 1, 2, 3)
    assert union.choose(scores, layout).nonzero().flatten().tolist() == [6, 17, 22, 28]
    model, buffer, tokens, layout = assembled("llama")
    done = model.repair(RepairInput(copy(buffer), tokens, layout, union))
    alone = model.repair(RepairInput(copy(buffer), tokens, layout, Epic(1)))
    assert not torch.allclose(done.logits, alone.logits, atol=1e-4)


def moved_in_words(before, fresh, slots, modules):
    """The slow twin of `Drift`: token by token what its docstring says, in fp32."""
    after = before.clone()
    for begin, end in modules:
        spoken = [i for i, slot in enumerate(slots) if begin < slot < end]
        if spoken:
            counts = [((slots[i] - begin) / 64) ** 0.5 for i in spoken]
            moves = [fresh[:, :, i] - before[:, :, slots[i]] for i in spoken]
            mean = sum(count * move for count, move in zip(counts, moves, strict=True))
            for slot in range(begin, end):
                after[:, :, slot] += mean / (sum(counts) + 4)
    return after


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_drift_moves_the_other_tokens_of_a_module_and_no_others(default, request):
    model, buffer, _, layout = assembled("llama")
    before = copy(buffer)
    begin = layout.modules[1][0]
    slots = [begin + 2, begin + 9, begin + 11, layout.modules[2][0], layout.fresh.shape[0] - 1]
    rows = Rows(torch.tensor(slots), layout.fresh.shape[0])
    shape = (1, model.shapes.kinds[0].heads, len(slots), model.shapes.kinds[0].key_dim)
    keys, values = torch.randn(shape), torch.randn(shape)
    drift = Drift(layout.modules)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(default)
    drift.transfer(0, rows, keys, values, buffer)
    assert torch.equal(buffer.keys, before.keys)  # layer 0 knows words only
    drift.transfer(2, rows, keys, values, buffer)
    for ours, old, fresh in (
        (buffer.keys, before.keys, keys),
        (buffer.values, before.values, values),
    ):
        twin = moved_in_words(old[2], fresh, slots, layout.modules)
        assert torch.allclose(ours[2], twin, atol=1e-6)
        assert torch.equal(ours[[0, 1, 3]], old[[0, 1, 3]])
        length = layout.fresh.shape[0]
        touched = (ours[2] != old[2]).any(dim=(0, 1, 3))[:length].nonzero().squeeze(1)
        # The second module alone: a first token, as that of the third, says nothing.
        assert touched.tolist() == list(range(*layout.modules[1]))


def test_drift_is_what_text_before_a_module_does_to_all_of_it():
    """Where a module moved as one, the tokens not recomputed end where full prefill has them."""
    model, _, tokens, layout = assembled("llama")
    whole = garbage(model, tokens.shape[1])
    model.prefill(whole, tokens)
    stale = copy(whole)
    torch.manual_seed(0)
    for begin, end in layout.modules:
        shift = torch.randn(model.shapes.num_layers - 1, 1, 1, 1, model.shapes.kinds[0].value_dim)
        stale.values[1:, :, :, begin:end] += shift
    error = {}
    for transfers in (True, False):
        repaired = copy(stale)
        selector = AnchorFlow(0.5, anchor_tokens=4, transfers_drift=transfers)
        model.repair(RepairInput(repaired, tokens, layout, selector))
        error[transfers] = float(
            (repaired.values - whole.values)[:, :, :, : tokens.shape[1]].norm()
        )
    assert error[True] < 0.75 * error[False]


def test_anchorflow_takes_anchors_and_of_the_rest_what_the_question_wants():
    layout = small_layout()
    scores = torch.zeros(2, 40)
    scores[:, [6, 22, 31]] = 1.0
    scores[:, 33] = 0.5
    chosen = AnchorFlow(3 / 26, anchor_tokens=1).choose(scores, layout)
    assert chosen.nonzero().flatten().tolist() == [6, 17, 22, 28, 31, 33]


@pytest.mark.parametrize("text", ["cacheblend+epic", "prophetkv+infoflow"])
def test_what_cannot_be_joined_is_refused(text):
    with pytest.raises(ConfigError, match="joined"):
        parse_method(text, SELECTORS)


@pytest.mark.parametrize(
    "text",
    [
        "nope",
        "epic:nope=1",
        "epic:anchor_tokens",
        "epic:anchor_tokens=-1",
        "epic:anchor_tokens=1.5",
        "epic:anchor_tokens=[1]",
        "random:seed=99999999999999999999",
        "random:seed=x",
        "anchorflow:transfers_drift=maybe",
        "infoflow:depth=true",
        "infoflow:recompute_ratio=NaN",
        "cacheblend:check_layer=[1]",
        "cacheblend:check_layer=1.5",
    ],
)
def test_bad_methods_are_refused(text):
    with pytest.raises(ConfigError):
        GenerationConfig(method=text).selector()


def test_methods_as_text_and_as_selectors():
    assert GenerationConfig(method="epic:anchor_tokens=4").selector() == Epic(4)
    joined = UnionSelector(members=(Epic(8), InfoFlow(0.04)))
    with pytest.raises(ConfigError, match="ratios of their own"):
        UnionSelector(1.0, (Epic(8), InfoFlow(0.04)))
    text = "epic:anchor_tokens=8+infoflow:recompute_ratio=0.04"
    assert GenerationConfig(method=text).selector() == joined
    own = CacheBlend(0.3, score="keys")
    assert GenerationConfig(method=own).selector() is own
    assert spelled(own) == 'cacheblend:recompute_ratio=0.3,score="keys"'


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("full", "takes none"),
        ("reuse", "takes none"),
        ("epic:anchor_tokens=4", "takes none"),
        ("cacheblend:recompute_ratio=0.1", "has one already"),
        ("epic:anchor_tokens=4+infoflow:recompute_ratio=0.04", "has one already"),
    ],
)
def test_a_ratio_that_would_change_nothing_is_refused(method, why):
    with pytest.raises(ConfigError, match=f"recompute_ratio=0.3 changes nothing: .* {why}"):
        GenerationConfig(method=method, recompute_ratio=0.3)


def test_another_method_does_not_take_the_ratio_of_the_one_before():
    own = GenerationConfig("cacheblend", recompute_ratio=0.3)
    assert own.replace(max_tokens=2).recompute_ratio == 0.3
    assert own.replace(method="cacheblend").recompute_ratio == 0.3
    assert own.replace(method="reuse").selector() == Reuse()
    assert own.replace(quality="exact").selector() == Prefix()
    assert own.replace(method="epic", recompute_ratio=0.5).selector() == Epic(recompute_ratio=0.5)


def check(layer, fresh_values, fresh_keys=None):
    zeros = torch.zeros(1, 6, 2)
    slots, reused = torch.arange(6), torch.tensor([True] * 5 + [False])
    keys = zeros if fresh_keys is None else fresh_keys
    return LayerCheck(layer, slots, reused, keys, fresh_values, zeros, zeros)


def test_cacheblend_by_values_by_keys_and_layer_by_layer():
    layout = Layout(
        torch.tensor([False] * 5 + [True]), torch.zeros(6, dtype=torch.bool), ((0, 5),), 8
    )
    values, keys = torch.zeros(1, 6, 2), torch.zeros(1, 6, 2)
    values[0, 1], keys[0, 3] = 5.0, 7.0
    for score, token in (("values", 1), ("keys", 3)):
        kept = CacheBlend(0.2, score=score).narrow(check(1, values, keys), layout)
        assert kept.nonzero().flatten().tolist() == [token, 5]
    assert CacheBlend(0.4, check_layer=3).check_layers(layout) == (3,)
    gradual = CacheBlend(0.4, check_layer=3, gradual=True)
    assert gradual.check_layers(layout) == (3, 4, 5, 6, 7)
    kept = [int(gradual.narrow(check(layer, values), layout).sum()) for layer in (3, 5, 7)]
    assert kept == [4, 3, 2]  # narrower and narrower, the ratio on average


def test_auto_takes_less_of_settled_modules_and_fast_the_same():
    fresh = torch.arange(1010) >= 1000
    spans = ((0, 400), (400, 1000))
    whole = Layout(fresh, torch.zeros(1010, dtype=torch.bool), spans, 4)
    half = dataclasses.replace(whole, settled=spans[1:])
    assert (Auto().budget(whole), Auto().budget(half)) == (300, 216)
    assert Auto(recompute_ratio=0.2).budget(half) == 144
    assert Fast().budget(whole) == Fast().budget(half) == 30


def test_lexical_chooses_what_stands_around_the_questions_rare_words():
    ids = torch.full((120,), 5)
    ids[:100] = torch.arange(100) % 4  # words that stand everywhere
    ids[[20, 60]] = torch.tensor([77, 78])  # two that are rare
    ids[100:] = torch.tensor([0, 1, 2, 77] * 5)  # the question has one of them
    fresh = torch.arange(120) >= 100
    layout = Layout(fresh, torch.arange(120) < 2, ((2, 100),), 4, ids=ids)

    def chosen(ratio, reach=3):
        return (Lexical(ratio, reach).first_rows(layout) & layout.reused).nonzero().flatten()

    assert chosen(0.011).tolist() == [20]
    assert chosen(0.031).tolist() == [19, 20, 21]
    assert set(range(17, 24)) <= set(chosen(0.9).tolist())
    none = dataclasses.replace(layout, ids=torch.where(fresh, 500, ids))
    assert not (Lexical(0.9).first_rows(none) & layout.reused).any()  # no word of it stands there
    exact = dataclasses.replace(layout, exact=~fresh, modules=())
    assert not (Lexical(1.0).first_rows(exact) & ~fresh).any()


@pytest.mark.parametrize(
    ("options", "says"), [((1.5,), "must be 0 to 1"), ((0.1, -1), "reach must be")]
)
def test_lexical_refuses_what_makes_no_sense(options, says):
    with pytest.raises(ConfigError, match=says):
        Lexical(*options)
