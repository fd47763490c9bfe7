"""docs/features.md: what people do with a model in each framework, by ours and by others.

Each "yes" of ours names a test that shows it; the others' answers are read off their classes. Run
as a script it writes the page's tables.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "features.md"
Says = Callable[[type], bool]


@dataclass(frozen=True)
class Feature:
    """A row: what it is, the test that shows ours has it ("" for no), and how to ask a class."""

    name: str
    test: str
    asks: Says


def own(name: str) -> Says:
    """Whether a class has a method of its own where its framework's base class has one."""

    def asks(kind: type) -> bool:
        bases = [base for base in kind.__mro__ if base.__module__.split(".")[1:2] == ["core"]]
        bases += [base for base in kind.__mro__ if base.__module__.startswith("langchain_core.")]
        return all(getattr(kind, name, None) is not getattr(base, name, None) for base in bases)

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


CHAT, TOOLS, CHAINS = (f"test_langchain_{name}.py" for name in ("chat", "tools", "chains"))
LANGCHAIN = (
    Feature(
        "streams tokens", f"{CHAT}::test_all_ways_of_asking_give_the_same_text", own("_stream")
    ),
    Feature(
        "answers in an event loop without a thread for each",
        f"{CHAT}::test_the_event_loop_goes_on_while_the_model_works",
        own("_agenerate"),
    ),
    Feature("a batch is computed together", f"{CHAT}::test_a_batch_is_a_batch", nobody),
    Feature("cancelling stops the model", f"{CHAT}::test_cancelling_stops_the_generation", nobody),
    Feature(
        "`bind_tools`",
        f"{TOOLS}::test_tools_are_called_streamed_and_their_results_read",
        own("bind_tools"),
    ),
    Feature(
        "`with_structured_output` by a JSON schema",
        f"{TOOLS}::test_structured_answers_are_objects",
        own("with_structured_output"),
    ),
    Feature(
        "arguments of tool calls always fit their schema",
        f"{TOOLS}::test_an_agent_calls_a_tool_and_gives_an_object",
        nobody,
    ),
    Feature(
        "log probabilities",
        f"{TOOLS}::test_log_probabilities_and_penalties_are_those_of_openai",
        setting("logprobs"),
    ),
    Feature(
        "a seed",
        f"{CHAT}::test_settings_reach_the_engine_and_can_be_bound",
        setting("seed"),
    ),
    Feature(
        "how many prompt tokens came from a cache, in `usage_metadata`",
        f"{CHAINS}::test_a_chain_by_hand",
        nobody,
    ),
    Feature(
        "retrieved texts are prefilled once, for any order and prompt",
        f"{CHAINS}::test_stuff_and_retrieval_chains",
        nobody,
    ),
    Feature("images", "", own("_convert_messages_to_ollama_messages")),
)
LLM, ENGINES, CALLS = (f"test_llama_index_{name}.py" for name in ("llm", "engines", "tools"))
LLAMA_INDEX = (
    Feature(
        "streams tokens", f"{LLM}::test_all_ways_of_chatting_give_the_same_text", own("stream_chat")
    ),
    Feature(
        "answers in an event loop without a thread for each",
        f"{LLM}::test_cancelling_stops_the_generation_and_the_loop_goes_on",
        own("astream_chat"),
    ),
    Feature(
        "`predict_and_call`, `FunctionAgent`: a `FunctionCallingLLM`",
        f"{CALLS}::test_a_tool_is_predicted_and_called",
        is_a("FunctionCallingLLM"),
    ),
    Feature(
        "`as_structured_llm` by a JSON schema",
        f"{CALLS}::test_structured_answers_are_objects",
        own("structured_predict"),
    ),
    Feature(
        "how many prompt tokens came from a cache",
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
        file = feature.test.partition("::")[0]
        mine = f"[yes](../tests/integrations/{file})" if feature.test else "no"
        theirs = ["yes" if feature.asks(kind) else "no" for kind in others]
        lines.append(f"| {' | '.join((feature.name, mine, *theirs))} |")
    return "\n".join(lines)


@pytest.mark.parametrize("feature", [*LANGCHAIN, *LLAMA_INDEX], ids=lambda one: one.name)
def test_each_yes_of_ours_is_a_test(feature):
    file, _, name = feature.test.partition("::")
    if file:
        tree = ast.parse((Path(__file__).parent / file).read_text())
        assert name in {one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}


def test_the_page_says_what_the_classes_say():
    assert tables() in PAGE.read_text(), "write it anew: python tests/integrations/test_features.py"


if __name__ == "__main__":
    mark = "<!-- written by tests/integrations/test_features.py -->"
    before, _, _ = PAGE.read_text().partition(mark)
    PAGE.write_text(f"{before}{mark}\n\n{tables()}\n")
