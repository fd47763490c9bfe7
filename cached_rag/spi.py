"""For those who write integrations and backends: what these are made of, and no user needs.

A name is imported when it is first used. It may change between minor versions; the names of
`cached_rag` itself do not.

An integration of a framework needs these. `FrameworkModel` is what its model extends: settings as
pydantic fields, the engine behind them, and `answer_config` for a call's options (`call_options`
drops those that change nothing; `GENERATION_SETTINGS` are fields, `CALL_SETTINGS` a call's alone).
`SchemaPrompt.receive` finds a schema's prompt in messages. `Learner` encodes what a retriever or a
vector store brings, now or later, and `Ledger` remembers which document has which text.
`template_head` finds what a prompt template begins with; `checked` refuses what is of another kind.
Tools are `cached_rag.Tools`, whose answers grow by `GrowingAnswer`; `new_call_id`,
`shown_logprob` and `shown_logprobs` are OpenAI's forms.
"""

from typing import TYPE_CHECKING

from cached_rag import imports_from

if TYPE_CHECKING:
    from cached_rag.backends.transformers.model import LanguageModel as LanguageModel
    from cached_rag.config import DEFAULT_MODEL as DEFAULT_MODEL
    from cached_rag.engine.decoding import Generation as Generation
    from cached_rag.engine.decoding import TokenLogprobs as TokenLogprobs
    from cached_rag.engine.decoding import shown_logprob as shown_logprob
    from cached_rag.engine.decoding import shown_logprobs as shown_logprobs
    from cached_rag.engine.engine import Prompt as Prompt
    from cached_rag.engine.stream import Stream as Stream
    from cached_rag.engine.tools import CallPart as CallPart
    from cached_rag.engine.tools import GrowingAnswer as GrowingAnswer
    from cached_rag.engine.tools import new_call_id as new_call_id
    from cached_rag.frameworks import CALL_SETTINGS as CALL_SETTINGS
    from cached_rag.frameworks import GENERATION_SETTINGS as GENERATION_SETTINGS
    from cached_rag.frameworks import Encode as Encode
    from cached_rag.frameworks import FrameworkModel as FrameworkModel
    from cached_rag.frameworks import Learner as Learner
    from cached_rag.frameworks import call_options as call_options
    from cached_rag.frameworks import checked as checked
    from cached_rag.frameworks import template_head as template_head
    from cached_rag.grammar.call_form import ToolCall as ToolCall
    from cached_rag.kv.disk import Handoff as Handoff
    from cached_rag.library.encode import EncodeSummary as EncodeSummary
    from cached_rag.library.ledger import Ledger as Ledger
    from cached_rag.methods import METHODS as METHODS
    from cached_rag.pml import SchemaPrompt as SchemaPrompt
    from cached_rag.rag.index import IndexedDocument as IndexedDocument
    from cached_rag.rag.progress import Progress as Progress
    from cached_rag.rag.progress import encode_progress as encode_progress
    from cached_rag.rag.rag import Deletion as Deletion
    from cached_rag.rag.workers import IngestRecipe as IngestRecipe
    from cached_rag.rag.workers import IngestTask as IngestTask
    from cached_rag.rag.workers import IngestWorker as IngestWorker
    from cached_rag.rag.workers import IngestWorkers as IngestWorkers
    from cached_rag.rag.workers import PreparedBatch as PreparedBatch
    from cached_rag.rag.workers import PreparedDocument as PreparedDocument

_PLACES = {
    "backends.transformers.model": ("LanguageModel",),
    "config": ("DEFAULT_MODEL",),
    "engine.decoding": ("Generation", "TokenLogprobs", "shown_logprob", "shown_logprobs"),
    "engine.stream": ("Stream",),
    "engine.engine": ("Prompt",),
    "engine.tools": ("CallPart", "GrowingAnswer", "new_call_id"),
    "frameworks": (
        "CALL_SETTINGS",
        "GENERATION_SETTINGS",
        "Encode",
        "FrameworkModel",
        "Learner",
        "call_options",
        "checked",
        "template_head",
    ),
    "grammar.call_form": ("ToolCall",),
    "library.encode": ("EncodeSummary",),
    "kv.disk": ("Handoff",),
    "library.ledger": ("Ledger",),
    "methods": ("METHODS",),
    "pml": ("SchemaPrompt",),
    "rag.index": ("IndexedDocument",),
    "rag.progress": ("Progress", "encode_progress"),
    "rag.rag": ("Deletion",),
    "rag.workers": (
        "IngestRecipe",
        "IngestTask",
        "IngestWorker",
        "IngestWorkers",
        "PreparedBatch",
        "PreparedDocument",
    ),
}

__all__ = [name for names in _PLACES.values() for name in names]
__getattr__ = imports_from(_PLACES, __name__)
