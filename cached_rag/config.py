"""The settings. They are checked when they are made, and cannot be changed afterwards.

Knows names and ranges; knows no model.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from cached_rag.errors import ContextOverflowError
from cached_rag.grammar.grammar import Grammar
from cached_rag.options import check_range, check_types, parted, require

if TYPE_CHECKING:
    from cached_rag.methods import Selector
else:
    Selector = Any  # methods need PyTorch, which a command's help does not

# The model that is meant where none is named: small, but good enough to see what the library does.
# A wheel has it, so no hub is needed (README).
DEFAULT_MODEL = "smollm2-135m"
# How near answers are to full prefill's, in words, and the method that each of them means.
QUALITIES = {"exact": "prefix", "auto": "auto", "fast": "fast"}
# The smallest temperature that is not 0, and the smallest repetition penalty: logits divided by
# less overflow. The inverse is the largest penalty, as logits multiplied by more overflow, too.
_COLDEST = 1e-4
_MOST_LOGPROBS = 20  # as OpenAI's
# Which prompts may go on with KV that a method repaired; see `StoreConfig`.
KeepsRepaired = bool | Literal["conversation"]
# How many texts there are to encode chunks behind (`library/primers.txt`).
MOST_PRIMERS = 3
# How KV may be written to disk (`kv/codecs.py`).
CODEC_NAMES = ("raw", "int8", "int4")
# What is learned from prompts; see `StoreConfig`.
Learns = Literal["off", "recurring"]


@dataclass(frozen=True)
class GenerationConfig:
    """How one prompt is prefilled and answered.

    Attributes:
        method: how the KV of chunks is used and repaired (docs/methods.md). The name of one of
            `cached_rag.spi.METHODS`; with options, as in "epic:anchor_tokens=32"; several, as in
            "epic+prophetkv"; or a selector of your own.
        quality: the same in a word, instead of a method: "exact" for full prefill's own answers
            (`prefix`), "auto", or "fast" (docs/methods.md has what each keeps). It becomes the
            method, and is None afterwards.
        recompute_ratio: share of the reused tokens to recompute, 0 to 1; None for the method's
            default. Methods that have none refuse it.
        max_tokens: most tokens of the answer.
        temperature: 0, and whatever is less than 0.0001, always takes the likeliest token.
        top_p, top_k: nucleus and top-k sampling; 1 and 0 switch them off. The nucleus of a top_p of
            0 is the likeliest token.
        stop: one string or several that end the answer; they are not part of it.
        seed: makes sampling repeatable; None for a new one each time.
        ignore_eos: go on to `max_tokens`, even if the model ends its answer earlier.
        repetition_penalty: 0.0001 to 10000; None for the one in the model's generation config.
        presence_penalty, frequency_penalty: taken off the logit of a token that the answer has
            already, once, and for each time; -2 to 2, as OpenAI has them.
        logprobs: note the log probabilities of each token and of so many of the likeliest ones at
            its place, by the model's logits as they are; None for none.
        grammar: the form that the answer must have; None for any.
        shows_control: control tokens of the answer stand in its text, as marks of thoughts and tool
            calls do (`Tools.settings`).
        drafts: guess tokens that the answer copies from the prompt or repeats, and check several in
            one pass. That changes how long an answer takes, not what it says.

    Raises:
        ConfigError: a value is out of range, or the method does not have an option.
    """

    method: str | Selector = "auto"
    quality: str | None = None
    recompute_ratio: float | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    grammar: Grammar | None = None
    shows_control: bool = False
    drafts: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _strings(self.stop))
        check_types(self)
        if self.quality is not None:
            self._take_quality(self.quality)
        check_range(self, 1, math.inf, "max_tokens")
        check_range(self, 0, math.inf, "top_k")
        check_range(self, 0, 1, "top_p", "recompute_ratio")
        check_range(self, _COLDEST, 1 / _COLDEST, "repetition_penalty")
        check_range(self, -2, 2, "presence_penalty", "frequency_penalty")
        check_range(self, 0, _MOST_LOGPROBS, "logprobs")
        hot = self.temperature
        require(0 <= hot < math.inf, f"temperature is 0 or more, and finite, not {hot}")
        if self.temperature < _COLDEST:
            # Some clients send 1e-8 for "none". With that, the likeliest token is as good as
            # certain, and the logits divided by it would overflow.
            object.__setattr__(self, "temperature", 0.0)
        check_range(self, -(1 << 63), (1 << 63) - 1, "seed")
        form = self.grammar
        require(form is None or isinstance(form, Grammar), f"this is no Grammar: {form!r}")
        require(
            form is None or not self.ignore_eos,
            "an answer in a given form ends with it, so ignore_eos cannot be followed",
        )
        self.selector()  # raises if it is none

    def _take_quality(self, word: str) -> None:
        words = ", ".join(QUALITIES)
        require(word in QUALITIES, f"quality is one of {words}, not {word!r}")
        require(self.method == "auto", f"quality={word!r} and method={self.method!r}: give one")
        object.__setattr__(self, "method", QUALITIES[word])
        object.__setattr__(self, "quality", None)

    def selector(self) -> Selector:
        """The method with its options, as an object.

        Raises:
            ConfigError: the method is unknown, or does not have an option.
        """
        from cached_rag.methods import SELECTORS, Selector, parse_method

        method, ratio = self.method, self.recompute_ratio
        if isinstance(method, str):
            return parse_method(method, SELECTORS, ratio)
        is_method = isinstance(method, Selector)
        require(is_method, f"no method: {method!r}; give its name, or make it a Selector")
        require(ratio is None, f"recompute_ratio: for methods by name; give {method} its own")
        return method

    def replace(self, **options: Any) -> GenerationConfig:
        """A copy with some settings changed.

        A quality takes the place of the method, and another method has its own `recompute_ratio` if
        none is given.

        Raises:
            ConfigError: an unknown name or a bad value.
        """
        if (word := options.get("quality")) is not None:
            options = {"method": "auto"} | options
        if QUALITIES.get(str(word), options.get("method", self.method)) != self.method:
            options = {"recompute_ratio": None} | options
        return dataclasses.replace(self, **parted(options, GenerationConfig)[0])


@dataclass(frozen=True)
class ModelConfig:
    """How a model is loaded and what runs it.

    Attributes:
        dtype: what to compute in: float32, bfloat16 or float16; None for this machine's fastest.
        device: where to compute: cpu, cuda or mps, with llama.cpp cpu or gpu; None for cuda,
            where transformers finds one, else cpu.
        weights: how weights are kept for decoding: "as stored", "bf16", "int8" or "int4".
        backend: what runs the model: "transformers", or "llama.cpp" for a GGUF.
        revision: branch, tag or commit of a hub id.
        adapter: folder or hub id of a LoRA adapter, which is merged into the weights when they are
            loaded (needs the extra `lora`).
        model_kwargs: further options of `AutoModelForCausalLM.from_pretrained`.
        chat_template_kwargs: what the chat template is given besides the messages, such as
            {"enable_thinking": False}.

    Raises:
        ConfigError: an option is of another type. Loading says whether it can be had.
    """

    dtype: str | None = None
    device: str | None = None
    weights: str = "as stored"
    backend: str = "transformers"
    revision: str | None = None
    adapter: str | None = None
    model_kwargs: Mapping[str, Any] | None = field(default=None, repr=False)  # may have a token
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:  # PyTorch's own, too
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        check_types(self)


@dataclass(frozen=True)
class BatchConfig:
    """How many prompts are answered at the same time.

    Attributes:
        max_rows: most prompts that are answered together; the other requests wait.
        max_bytes: most bytes of KV that these prompts and their answers have; None for no bound.
            Answers take memory as they grow. If it ends, the youngest waits without its own, and
            goes on later. The memory of the store has its own bounds, in `StoreConfig`.
        max_waiting: most requests that may wait; one more is refused with `BusyError`. A tenant who
            has less than its share is refused at twice the number only. None for no bound.
        max_wait_seconds: a request that would wait longer before its answer is begun, by the pace
            at which the last ones were admitted, is refused with `BusyError`. None for no bound.
        prefill_tokens: about how many prompt tokens, new or repaired, are computed between two
            tokens of the running answers. More lets new prompts begin sooner, and makes running
            answers slower meanwhile.
        shares: KV that running prompts have in common is kept once and read once.

    Raises:
        ConfigError: a value is out of range.
    """

    max_rows: int = 16
    max_bytes: int | None = None
    max_waiting: int | None = None
    max_wait_seconds: float | None = None
    prefill_tokens: int = 512
    shares: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, 1, math.inf, "max_rows", "max_bytes", "max_waiting", "prefill_tokens")
        wait = self.max_wait_seconds
        require(wait is None or wait > 0, f"max_wait_seconds must be positive: {wait}")


@dataclass(frozen=True)
class StoreConfig:
    """Where KV is kept and how much of it.

    Attributes:
        path: folder on disk, `~` is the user's own; None keeps KV in memory only.
        codec: how KV is written to disk. "raw" keeps the model's dtype; "int8" takes half of the
            space of 16 bits, "int4" a third, and they lose precision (docs/store.md).
        memory_bytes: most bytes of chunks' KV in the host's memory.
        device_bytes: most bytes of chunks' KV in a CUDA device's memory. 0 keeps none there; None
            takes a quarter of what is free. Without a CUDA device it means nothing.
        disk_bytes: most bytes of KV on disk; None for no bound.
        remote: address of a store that several machines share, below the disk:
            "redis://host:6379/0", "s3://bucket/prefix" and the like (docs/scale.md). What is
            encoded is sent there in the background; what a prompt lacks is brought in one round
            trip, if that is faster than computing it.
        remote_timeout: the longest that a prompt waits for the remote store, in seconds.
        signing_key: signs KV on disk and in the remote store; what is not signed with it is not
            used, and computed anew. None for checksums only, which guard against damage.
        namespace: the tenant; tenants with different namespaces never share KV.
        sequence_bytes: most bytes of KV of finished prompts and their answers, which is kept for
            prompts that begin alike, such as the next turn of a conversation; 0 keeps none. None
            takes a quarter of `memory_bytes`, or an eighth of what is free where the model
            computes, if that is less.
        sequence_disk_bytes: most bytes of that on disk, under `path`, where it is found by later
            processes: conversations are written when they go on, all else when the engine is
            closed; 0 for none. None for as many as `sequence_bytes`, if there is a path.
        keeps_repaired: keep KV of finished prompts also where a method repaired it, for prompts of
            the same method: with "conversation" for those that go on where the repaired prompt
            ended, with True for all that begin with the same chunks, whatever they ask. With False
            only KV that full prefill would compute is kept, and no answer depends on earlier
            prompts.
        harvest: chunks that a request missed are taken from what earlier prompts left, until they
            are encoded: computed behind other texts, moved, and repaired as any chunk. None for
            wherever earlier prompts are kept and `keeps_repaired` is not False; docs/experiments.md
            has what it costs.
        settle: where prompts begin with the same chunks in the same order again, that beginning is
            computed in full in the background, kept among `sequence_bytes`, and from then on reused
            without loss. Needs `write_back`, and `keeps_repaired` not to be False.
        primers: in how many passes a chunk is encoded, each behind another primer, 1 to 3; their
            mean is kept. That takes so many times as long, once, and brings answers nearer to full
            prefill's (docs/quality.md). A model whose keys cannot be moved takes one pass. An index
            of `CachedRAG` has a setting of its own.
        first_exact: encode chunks behind a known prefix alone, too, so that the first chunk of a
            prompt is exact: a pass more, once, and twice the room; False for one pass. An index of
            `CachedRAG` has a setting of its own.
        composes: where layers keep states (Qwen 3.5, Granite 4 H), encode chunks all the same, with
            what they do to these states, for the method `compose`. An experiment: a chunk takes as
            many bytes as one or two states, twice with `first_exact` of an index (docs/methods.md).
        ttl_seconds: a text's KV is used no more so long after it was encoded, and deleted with the
            next that is kept; None for never. What prompts left (`sequence_bytes`) has no such
            time. For single texts, and to pin some, there is `Engine.hold`.
        write_back: encode chunks that a request missed in the background.
        finish_seconds: how long `Engine.close`, or the interpreter's end, may go on encoding chunks
            that still wait, so that the next process finds their KV on disk; 0 drops them. Without
            `path` nothing is encoded then.
        learn_prefixes: a head that recurs before the first chunks of prompts is encoded in the
            background, and then reused without loss. Missed chunks are encoded behind it.
        learn: with "recurring", texts of at least 64 tokens that two prompts have at different
            places become known, as if they had been given to `Engine.register`, before the second
            one is answered, and are encoded in the background: documents that an application puts
            into its prompts, of which nobody told the engine. Prompts are remembered as digests
            only, within a bound.
        audit_rate: share of the requests with reused KV whose first token is compared with full
            prefill's, in the background; 0 to 1. `Engine.audits` has what was found.
        audit_limit: mean divergence in nats, over at least eight audits, past which a method is
            used no more, and prompts are computed in full.
        pipelined: read KV from disk layer by layer, while the model computes layers that were read.
            If not, all is read first. None turns it on for accelerators only: on a CPU, reading
            and computing compete for the same cores (measured in docs/store.md).

    Raises:
        ConfigError: a value is out of range.
    """

    path: str | None = None
    codec: str = "raw"
    memory_bytes: int = 2 << 30
    device_bytes: int | None = None
    disk_bytes: int | None = None
    remote: str | None = field(default=None, repr=False)
    remote_timeout: float = 2.0
    signing_key: str | None = field(default=None, repr=False)
    namespace: str = ""
    sequence_bytes: int | None = None
    sequence_disk_bytes: int | None = None
    keeps_repaired: KeepsRepaired = "conversation"
    harvest: bool | None = None
    settle: bool = True
    primers: int = 1
    first_exact: bool = True
    composes: bool = False
    ttl_seconds: float | None = None
    write_back: bool = True
    finish_seconds: float = 30.0
    learn_prefixes: bool = True
    learn: Learns = "off"
    audit_rate: float = 0.0
    audit_limit: float = 0.5
    pipelined: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.path, os.PathLike):
            object.__setattr__(self, "path", os.fspath(self.path))
        check_types(self)
        if self.path is not None:
            require("\0" not in self.path, f"no folder is called {self.path!r}: leave out the \\0")
            object.__setattr__(self, "path", os.path.expanduser(self.path))
            there_is = not self.path.startswith("~")
            require(there_is, f"path {self.path!r}: there is no such user; write ./~ for a folder")
        codecs = ", ".join(CODEC_NAMES)
        require(self.codec in CODEC_NAMES, f"codec is one of {codecs}, not {self.codec!r}")
        check_range(self, 1, math.inf, "memory_bytes", "disk_bytes")
        check_range(self, 0, math.inf, "sequence_bytes", "sequence_disk_bytes", "device_bytes")
        check_range(self, 0, math.inf, "finish_seconds")
        check_range(self, 1, MOST_PRIMERS, "primers")
        check_range(self, 0, 1, "audit_rate")
        require(
            not self.sequence_disk_bytes or (self.path is not None and self.sequence_bytes != 0),
            "sequence_disk_bytes bounds what finished prompts leave on disk: it needs a path, and "
            "sequence_bytes that are not 0",
        )
        require(
            self.keeps_repaired in (True, False, "conversation"),
            f'keeps_repaired is True, False or "conversation", not {self.keeps_repaired!r}',
        )
        require(
            self._keeps or not self.harvest,
            "harvest takes KV from earlier prompts, and sequence_bytes=0 or keeps_repaired=False "
            "lets none serve; leave one of them out",
        )
        require(
            not (self.composes and self.remote),
            "what chunks do to states is not kept in a remote store; leave out composes or remote",
        )
        require(
            self.ttl_seconds is None or not self.remote,
            "ttl_seconds does not reach a remote store; leave it out, or remote",
        )
        ttl = self.ttl_seconds
        require(ttl is None or ttl > 0, f"ttl_seconds must be positive, not {ttl}")
        require(
            self.learn in ("off", "recurring"), f'learn is "off" or "recurring", not {self.learn!r}'
        )
        require(
            self.write_back or self.learn == "off",
            'learn="recurring" has texts encoded in the background, and write_back=False lets '
            "nothing be; leave one of them out",
        )
        require(self.audit_limit > 0, f"audit_limit must be positive, not {self.audit_limit}")
        require(
            self.write_back or not self.audit_rate,
            "audit_rate has prompts computed in the background, and write_back=False lets nothing "
            "be; leave one of them out",
        )
        try:
            self.namespace.encode()
        except UnicodeEncodeError:
            require(False, f"a namespace is text, not {self.namespace!r}")
        wait, signed = self.remote_timeout, self.signing_key
        require(0 < wait < 3600, f"remote_timeout is no number of seconds to wait: {wait}")
        require(
            signed is None or 16 <= len(signed.encode()) <= 64,
            "signing_key is too short or too long; take 16 to 64 random characters",
        )

    @property
    def harvests(self) -> bool:
        """Whether missed chunks are taken from earlier prompts."""
        return self._keeps if self.harvest is None else self.harvest

    @property
    def _keeps(self) -> bool:
        return self.sequence_bytes != 0 and self.keeps_repaired is not False


def _strings(stop: Any) -> tuple[str, ...]:
    found = (stop,) if isinstance(stop, str) else stop or ()
    is_several = isinstance(found, Iterable)
    require(is_several, f"stop is a string, or several, not {stop!r}")
    strings = tuple(found)
    require(all(isinstance(s, str) and s for s in strings), "stop strings must not be empty")
    return strings


def check_room(max_tokens: int, context: int) -> None:
    """Refuse an answer's length that leaves no room for a prompt, however short that is.

    Args:
        context: tokens of the model's context.

    Raises:
        ContextOverflowError: it is the context's length or more.
    """
    if max_tokens >= context:
        raise ContextOverflowError(
            f"max_tokens={max_tokens} exceeds the model's context of {context}, which has to hold "
            "the prompt, too; lower it"
        )
