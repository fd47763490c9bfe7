"""docs/features.md: what people do with a model in each framework, by ours and by others.

Each "yes" of ours names a test that shows it; the others' answers are read off their classes. Run
as a script it writes the page's tables.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "features.md"
Says = Callable[[type], bool]


@dataclass(frozen=True)
class Feature:
    """A row of a table.

    Attributes:
        name: what it is.
        test: shows that ours has it, by its path from this folder; "" if it has not.
        asks: whether another class has it.
        needs_endpoint: ChatHuggingFace passes it to an endpoint, and not to a model of one's own
            (its `_to_chat_prompt`, and what `HuggingFacePipeline._generate` takes).
    """

    name: str
    test: str
    asks: Says
    needs_endpoint: bool = False


def own(name: str) -> Says:
    """Whether a class has a method of its own, which is not its framework's."""

    def asks(kind: type) -> bool:
        # Frameworks wrap methods, also inherited ones; the innermost says where it is written.
        written = inspect.unwrap(getattr(kind, name)).__module__
        return not written.startswith(("langchain_core.", "llama_index.core."))

    return asks


def setting(*names: str) -> Says:
    """Whether a class has a setting of one of these names."""
    return lambda kind: any(name in kind.model_fields for name in names)  # type: ignore[attr-defined]


def is_a(name: str) -> Says:
    """Whether a class, or one that it extends, has this name."""
    return lambda kind: any(base.__name__ == name for base in kind.__mro__)


def nobody(_: type) -> bool:
    """What no other class does."""
    return False


THINKING = "whether and how hard a model thinks (ours: `chat_template_kwargs`)"
THINKS = "../backends/test_variants.py::test_the_frameworks_have_them_all"
CHAT, TOOLS, CHAINS = (f"test_langchain_{name}.py" for name in ("chat", "tools", "chains"))
LANGCHAIN = (
    Feature("streams", f"{CHAT}::test_all_ways_of_asking_give_the_same_text", own("_stream")),
    Feature(
        "asynchronous by itself, not by a thread for each call",
        f"{CHAT}::test_the_event_loop_goes_on_while_the_model_works",
        own("_agenerate"),
        needs_endpoint=True,
    ),
    Feature(
        "`bind_tools`, agents",
        f"{TOOLS}::test_tools_are_called_streamed_and_their_results_read",
        own("bind_tools"),
        needs_endpoint=True,
    ),
    Feature(
        "`with_structured_output`",
        f"{TOOLS}::test_structured_answers_are_objects",
        own("with_structured_output"),
        needs_endpoint=True,
    ),
    Feature(
        "log probabilities",
        f"{TOOLS}::test_log_probabilities_and_penalties_are_those_of_openai",
        setting("logprobs"),
        needs_endpoint=True,
    ),
    Feature(
        "a seed",
        f"{CHAT}::test_settings_reach_the_engine_and_can_be_bound",
        setting("seed"),
        needs_endpoint=True,
    ),
    Feature(THINKING, THINKS, setting("reasoning")),
    Feature(
        "prompt tokens from cache in `usage_metadata`",
        f"{CHAINS}::test_a_chain_by_hand",
        nobody,
    ),
    Feature(
        "retrieved texts are prefilled once, for any order and prompt",
        f"{CHAINS}::test_stuff_and_retrieval_chains",
        nobody,
    ),
)
LLM, ENGINES, CALLS = (f"test_llama_index_{name}.py" for name in ("llm", "engines", "tools"))
LLAMA_INDEX = (
    Feature("streams", f"{LLM}::test_all_ways_of_chatting_give_the_same_text", own("stream_chat")),
    Feature(
        "asynchronous by itself",
        f"{LLM}::test_cancelling_stops_the_generation_and_the_loop_goes_on",
        own("astream_chat"),
    ),
    Feature(
        "a `FunctionCallingLLM`: `predict_and_call`, `FunctionAgent`",
        f"{CALLS}::test_a_tool_is_predicted_and_called",
        is_a("FunctionCallingLLM"),
    ),
    Feature(
        "`structured_predict` by a schema, not by asking for JSON",
        f"{CALLS}::test_structured_answers_are_objects",
        own("structured_predict"),
    ),
    Feature(THINKING, THINKS, setting("thinking")),
    Feature(
        "prompt tokens from cache in each answer",
        f"{LLM}::test_usage_and_report_come_with_every_answer",
        nobody,
    ),
    Feature(
        "retrieved nodes are prefilled once, for any order and prompt",
        f"{ENGINES}::test_stock_modes_reuse_every_node",
        nobody,
    ),
)


def tables() -> str:
    """Both tables, in Markdown."""
    chat_ollama = pytest.importorskip("langchain_ollama").ChatOllama
    chat_hugging_face = pytest.importorskip("langchain_huggingface").ChatHuggingFace
    ollama = pytest.importorskip("llama_index.llms.ollama").Ollama
    hugging_face = pytest.importorskip("llama_index.llms.huggingface").HuggingFaceLLM
    return "\n\n".join(
        (
            _table(LANGCHAIN, "ChatCachedRAG", (chat_ollama, chat_hugging_face)),
            _table(LLAMA_INDEX, "CachedRAGLLM", (ollama, hugging_face)),
        )
    )


def _table(features: tuple[Feature, ...], ours: str, others: tuple[type, ...]) -> str:
    names = [ours, *(kind.__name__ for kind in others)]
    lines = ["| | " + " | ".join(f"`{name}`" for name in names) + " |", "|---|---|---|---|"]
    for feature in features:
        file = (HERE / feature.test.partition("::")[0]).resolve()
        mine = f"[yes](../{file.relative_to(ROOT).as_posix()})" if feature.test else "no"
        theirs = [_said(feature, kind) for kind in others]
        lines.append(f"| {' | '.join((feature.name, mine, *theirs))} |")
    return "\n".join(lines)


def _said(feature: Feature, kind: type) -> str:
    if not feature.asks(kind):
        return "no"
    is_remote = feature.needs_endpoint and kind.__name__ == "ChatHuggingFace"
    return "with an endpoint only" if is_remote else "yes"


@pytest.mark.parametrize("feature", [*LANGCHAIN, *LLAMA_INDEX], ids=lambda one: one.name)
def test_each_yes_of_ours_is_a_test(feature):
    file, _, name = feature.test.partition("::")
    if file:
        tree = ast.parse((HERE / file).read_text())
        assert name in {one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}


def test_the_page_says_what_the_classes_say():
    assert tables() in PAGE.read_text(), "write it anew: python tests/integrations/test_features.py"


if __name__ == "__main__":
    mark = "<!-- written by tests/integrations/test_features.py -->"
    before, _, _ = PAGE.read_text().partition(mark)
    PAGE.write_text(f"{before}{mark}\n\n{tables()}\n")
