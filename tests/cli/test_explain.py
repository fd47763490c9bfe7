"""Explanations: as a page, in a notebook, as text; of hostile documents, and of huge prompts."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser

import pytest
from conftest import CHUNKS, NEW_PROMPTS, ask, tiny_model
from test_cli import index, run, words  # noqa: F401

from cached_rag import Answer, ConfigError, Engine, Explanation, Hit
from cached_rag.backends import machine as profile
from cached_rag.backends.machine import Profile
from cached_rag.cli import main as cli
from cached_rag.engine.explanation import visible
from cached_rag.engine.report import Report
from cached_rag.engine.trace import Kind, Span, Trace
from cached_rag.kv.fingerprint import digest

HOSTILE = (
    "</span></div></style><script>alert(1)</script><img src=x onerror=alert(1)>"
    "{{ 7 * 7 }}{% raw %} &lt;b&gt; \x1b[2J\x00\r \u202eEVIL\u2066\x9b \x85"
)
ALLOWED = {
    *("html", "head", "meta", "title", "body", "div", "style", "h1", "h2", "h3", "p", "span"),
    *("i", "b", "em", "dl", "dt", "dd", "ol", "ul", "li", "details", "summary"),
}
VOID = {"meta"}


class Reader(HTMLParser):
    """The page as a browser's parser sees it: its text, tags and attributes."""

    def __init__(self, page):
        super().__init__()
        self.text, self.tags, self.attributes, self.open = [], set(), set(), []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)


@pytest.fixture
def generation(engine):
    engine.encode(CHUNKS, prefix=engine.head(ask(CHUNKS[0]), CHUNKS[0]), context=None)
    return engine.generate(ask(*CHUNKS), max_tokens=4)


@pytest.fixture
def answer(generation):
    hits = tuple(Hit(CHUNKS[n], f"{name}.txt", "", 0, 0.5) for n, name in enumerate("abc"))
    return Answer("Because.", hits, generation.report, "Why?", trace_source=generation.trace_source)


def test_the_page_has_the_whole_prompt_each_token_by_its_kind(generation):
    page = Explanation.of(generation).html()
    read = Reader(page)
    assert read.tags <= ALLOWED
    shown = "".join(read.text)
    for piece in ("<|im_start|>system\nYou answer briefly.", "What happened?<|im_end|>"):
        assert piece in shown
    for span in generation.trace.spans:
        assert generation.trace.text[span.begin : span.end] in shown
    for kind, count in generation.trace.counts.items():
        key = f'<span class="{kind.name}">{kind.value}</span> {count}</dt>'
        assert (key in page) == (count > 0)
    assert all(f"span.{kind.name} " in page for kind in set(Kind) - {Kind.COMPUTED})
    assert all(f"i.{kind.name} " in page for kind in Kind)


def test_the_page_loads_nothing_and_follows_the_readers_colours(generation):
    page = Explanation.of(generation).html()
    assert page.count("prefers-color-scheme: dark") == 2  # what is in it, and the ground behind
    assert 'name="viewport"' in page
    assert "default-src 'none'" in page
    for word in ("://", "url(", "@import", "<script", "<link", "src="):
        assert word not in page


def test_a_notebook_gets_the_part_with_its_style_in_it(answer):
    part = answer.explain()._repr_html_()
    assert part.lstrip().startswith("<div")
    assert Reader(part).tags <= ALLOWED - {"html", "head", "body"}
    rules = part.split("<style>")[1].split("</style>")[0]
    for line in rules.splitlines():
        if "{" in line and not line.startswith(" "):
            assert ".cached-rag-explanation" in line


def test_hostile_text_is_shown_and_does_nothing(engine, tmp_path):
    chunk = f"{HOSTILE} and enough text that it is a chunk which can be found in a prompt."
    engine.encode([chunk], context=None)
    made = engine.generate(f"{HOSTILE}\n{chunk}\n\n{HOSTILE}", method="reuse", max_tokens=2)
    made.report.notes.append(HOSTILE)
    names = {digest(chunk): HOSTILE, "other": "\ud800" + HOSTILE}
    explanation = Explanation.of(made, names=names, title=HOSTILE, text=HOSTILE)
    explanation.save(tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    read = Reader(page)
    assert read.tags <= ALLOWED
    assert not {name for name in read.attributes if name.startswith("on") or name == "src"}
    assert "".join(read.text).count("<script>alert(1)</script>") >= 6
    assert "{{ 7 * 7 }}" in "".join(read.text)
    for shown in (page, str(explanation)):
        assert not set("\x00\x1b\r\u202e\u2066\x9b\x85\ud800") & set(shown)
        assert "⟨U+001B⟩[2J⟨U+0000⟩⟨U+000D⟩ ⟨U+202E⟩EVIL⟨U+2066⟩⟨U+009B⟩" in shown
    json.dumps(explanation.to_dict())


def test_what_can_be_seen_stays():
    text = "Zeilen\n\tund \u2028 中文 עברית 🙂 e\u0301 \u200d"
    assert visible(text) == text.replace("\u2028", "⟨U+2028⟩")


@pytest.mark.parametrize("parts", [1, 10_000])
def test_a_huge_prompt_is_cut_and_says_so(parts):
    each = 5_000_000 // parts
    looks = ((Kind.COMPUTED, 0), (Kind.MOVED, None))
    spans = tuple(Span(each * i, each * (i + 1), 1, *looks[i % 2]) for i in range(parts))
    part = dataclasses.replace(_part(), counts=dict.fromkeys(Kind, 1))
    trace = Trace("<" * each * parts, spans, (part,))
    page = Explanation(trace, Report("reuse", prompt_tokens=parts)).html()
    assert len(page) < 1_000_000
    assert "characters are not shown" in page
    assert ("further pieces of the prompt are not shown" in page) == (parts > 1)
    assert 30_000 < page.count("&lt;") < 200_000


def test_a_prompt_that_is_not_huge_is_shown_whole_however_it_is_divided():
    edges = ((0, 20, None), (20, 60_000, 0))
    spans = tuple(Span(begin, end, 1, Kind.COMPUTED, part) for begin, end, part in edges)
    shown = Explanation(Trace("<" * 60_000, spans, (_part(),)), Report("reuse", prompt_tokens=2))
    assert [one.left_out for one in shown.segments()] == [0, 0]


def _part():
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    engine.encode(CHUNKS[:1], context=None)
    return engine.generate(CHUNKS[0] + " Why?", method="reuse", max_tokens=1).trace.parts[0]


def test_text_for_a_terminal(answer):
    shown = str(answer.explain())
    report = answer.report
    assert shown.startswith(report.to_line())
    assert f"repaired {report.recomputed_tokens:>7}" in shown
    assert "0.50  b.txt #0" in shown
    assert "tokens from memory" in shown
    for stage in ("match", "load", "prefill", "further tokens"):
        assert stage in shown
    assert "search" not in shown  # it took no time
    assert "full prefill" not in shown.lower()


def test_plain_values_name_parts_as_the_page_does(answer):
    shown = answer.explain()
    names = [part["name"] for part in shown.to_dict()["parts"]]
    assert names == shown.called
    assert any(name.startswith("0.50  b.txt #0") for name in names)


def test_full_prefill_does_not_say_that_chunks_have_no_kv(engine, answer):
    full = engine.generate(ask(*CHUNKS), method="full", max_tokens=1)
    shown = dataclasses.replace(answer, report=full.report, trace_source=full.trace_source)
    assert str(shown.explain()).count("or the method takes none") == len(CHUNKS)


def test_sources_that_are_not_in_the_prompt_are_named(answer):
    other = Hit("Nothing of this stands in the prompt at all.", "d.txt", "", 0, 0.4)
    more = dataclasses.replace(answer, sources=(*answer.sources, other))
    for shown in (str(more.explain()), more.explain().html()):
        assert "shorter than 32 characters, without KV" in shown
        assert "d.txt" in shown


def test_full_prefill_is_measured_or_estimated_by_a_profile_or_left_out(
    engine, generation, monkeypatch, tmp_path
):
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path))
    assert generation.trace.full_ms is None
    full = engine.generate(ask(*CHUNKS), method="full", max_tokens=4)
    slow = dataclasses.replace(full, report=dataclasses.replace(full.report, ttft_ms=1e6))
    measured = Explanation.of(generation, slow)
    assert "Full prefill, measured: first token after 1000000 ms" in str(measured)
    assert "With full prefill" in measured.html()
    monkeypatch.setattr(profile, "measure", lambda _: Profile(0.01, 0.0))
    profile.profile_of(engine.model)
    made = engine.generate(ask(*CHUNKS), max_tokens=4)
    about = f"about {made.report.prompt_tokens * 10} ms: an estimate"
    for shown in (str(Explanation.of(made)), Explanation.of(made).html()):
        assert about in shown
    assert "estimate" not in str(Explanation.of(made, slow))
    again = engine.generate(ask(*CHUNKS), method="full", max_tokens=4)
    assert "estimate" not in str(Explanation.of(again))


def test_an_answer_without_a_prompt_is_refused(engine):
    with pytest.raises(ConfigError, match="cannot be explained"):
        Answer("made up", (), Report("auto")).explain()
    one, other = (Answer("a", (), Report("auto"), question=text) for text in ("Who?", "Why?"))
    with pytest.raises(ConfigError, match=r"'Why\?' cannot be compared with one to 'Who\?'"):
        one.explain(other)
    with pytest.raises(ConfigError, match="a piece first"):
        Explanation.of(engine.stream("Why?"))


def test_the_command_prints_writes_and_gives_json(index, tmp_path):  # noqa: F811
    command = ["explain", "copper green?", "--index", str(index), "-k", "2", "--max-tokens", "5"]
    command += ["--dtype", "float32"]
    shown = run(cli.app, command)
    assert shown.exit_code == 0, shown.output
    assert "b.txt #0" in shown.stdout
    assert "from disk" in shown.stdout
    page = tmp_path / "out.html"
    assert "out.html" in run(cli.app, [*command, "--html", str(page), "--compare"]).stdout
    assert "Full prefill, measured" in page.read_text(encoding="utf-8")
    assert "copper green?" in page.read_text(encoding="utf-8")
    found = json.loads(run(cli.app, [*command, "--json"]).stdout)
    assert sum(found["counts"].values()) == found["report"]["prompt_tokens"]
    assert {"prompt", "spans", "parts", "stages", "full", "text"} <= set(found)
    assert found["full"] is None
