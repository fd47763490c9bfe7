"""langchain-tests' own suites: SmolLM2 for the chat model, tiny embeddings for the rest."""

from __future__ import annotations

import pytest
from conftest import smollm2, tiny_model
from langchain_cached_rag import (
    CachedRAGVectorStore,
    CachedRetriever,
    ChatCachedRAG,
    SentenceTransformerEmbeddings,
)
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import (
    ChatModelIntegrationTests,
    EmbeddingsIntegrationTests,
    RetrieversIntegrationTests,
    VectorStoreIntegrationTests,
)
from langchain_tests.unit_tests import ChatModelUnitTests, EmbeddingsUnitTests

from cached_rag import Engine

pytestmark = pytest.mark.filterwarnings(
    # pytest-recording and pytest-benchmark, which langchain-tests brings along
    "ignore::pytest.PytestWarning",
)


# A model of 135M repeats itself without end in texts of any length.
SPEECH = {"max_tokens": 64, "frequency_penalty": 1.0}


class TestChatModelUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self):
        return ChatCachedRAG

    @property
    def chat_model_params(self):
        return {"model": "smollm2-135m"}


@pytest.mark.real
class TestChatModelIntegration(ChatModelIntegrationTests):
    engine = None

    @property
    def chat_model_class(self):
        return ChatCachedRAG

    @property
    def chat_model_params(self):
        if TestChatModelIntegration.engine is None:
            TestChatModelIntegration.engine = Engine(smollm2())
        return {"engine": TestChatModelIntegration.engine, **SPEECH}

    @property
    def standard_chat_model_params(self):
        return {"temperature": 0}

    @property
    def supports_model_override(self):
        return False  # another model would have to be loaded

    @property
    def supported_usage_metadata_details(self):
        both = ["cache_read_input", "cache_creation_input"]
        return {"invoke": both, "stream": both}

    @pytest.mark.xfail(reason="a model of 135M calls no tool unless it must", strict=True)
    def test_agent_loop(self, model):
        """Agents are tried in test_langchain_tools.py."""
        super().test_agent_loop(model)

    @pytest.mark.xfail(
        reason="a model of 135M does not come to the end of a Chinese name", strict=True
    )
    def test_unicode_tool_call_integration(self, model):
        """Other scripts are tried in grammar/test_grammar.py."""
        super().test_unicode_tool_call_integration(model)

    def _usage(self, stream, **knows):
        """An answer to a prompt whose long part the engine knows, or is about to.

        Counts are counts whatever is answered, so a tiny model does.
        """
        text = "Water boils at a hundred degrees, at sea level; on mountains it boils sooner. " * 3
        llm = ChatCachedRAG(engine=Engine(tiny_model("llama")), max_tokens=4)
        if knows["read"]:
            llm.encode([text])
        else:
            llm.register([text])
        prompt = [("human", f"{text}\n\nWhere does water boil sooner?")]
        if not stream:
            return llm.invoke(prompt)
        first, *others = llm.stream(prompt)
        return sum(others, first)

    def invoke_with_cache_read_input(self, *, stream=False):
        return self._usage(stream, read=True)

    def invoke_with_cache_creation_input(self, *, stream=False):
        return self._usage(stream, read=False)


@pytest.mark.real
class TestEmbeddingsUnit(EmbeddingsUnitTests):
    @property
    def embeddings_class(self):
        return SentenceTransformerEmbeddings

    @property
    def embedding_model_params(self):
        return {"model": "all-minilm-l6-v2"}


@pytest.mark.real
class TestEmbeddingsIntegration(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self):
        return SentenceTransformerEmbeddings

    @property
    def embedding_model_params(self):
        return {"model": "all-minilm-l6-v2"}


@pytest.fixture
def llm(engine):
    return ChatCachedRAG(engine=engine, max_tokens=4)


class TestVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, llm, tmp_path):
        inner = InMemoryVectorStore(self.get_embeddings())
        store = CachedRAGVectorStore(inner, llm, ledger=tmp_path / "ledger.sqlite")
        yield store
        store.close()


def documents_of(count=5):
    words = ["copper", "lamp", "dogs", "sledge", "oxygen"]
    return [f"A document about {word} and nothing else at all." for word in words[:count]]


class TestRetriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self):
        return CachedRetriever

    @property
    def retriever_constructor_params(self):
        llm = ChatCachedRAG(engine=Engine(tiny_model("llama")))
        fake = DeterministicFakeEmbedding(size=6)
        store = CachedRAGVectorStore.from_texts(documents_of(), fake, llm=llm)
        return {"retriever": store.as_retriever(), "llm": llm, "encode": "eager"}

    @property
    def retriever_query_example(self):
        return "copper"
