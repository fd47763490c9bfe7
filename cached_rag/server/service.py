"""What the server does for a request, apart from HTTP. Knows engines; knows no socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace

from cached_rag.backends.prompt_text import Rendered
from cached_rag.config import GenerationConfig
from cached_rag.engine.engine import Engine
from cached_rag.engine.stream import Stream
from cached_rag.engine.tools import Tools
from cached_rag.errors import ConfigError, ContextOverflowError
from cached_rag.server.endings import Metrics
from cached_rag.server.forms import Envelope, Json, ended
from cached_rag.server.index import ServedIndex, public_name, sources
from cached_rag.server.protocol import ChatRequest, CompletionRequest
from cached_rag.server.tenants import Tenants

# Most chunks of a response that wait for the client to read them.
_AHEAD = 16


@dataclass(eq=False)
class Asked:
    """A request whose answers are being made, `n` for each of its prompts.

    Attributes:
        tools: those that the answers may call.
        counts_usage: whether the stream is to end with the numbers of tokens.
        lease: keeps the tenant's engine open; to be closed at the end.
    """

    streams: list[Stream]
    tools: Tools
    envelope: Envelope
    counts_usage: bool
    lease: ExitStack


class Service:
    """One engine for many clients."""

    def __init__(
        self,
        engine: Engine,
        name: str | None = None,
        usual: GenerationConfig | None = None,
        max_spaces: int = 320,
        index: ServedIndex | None = None,
    ) -> None:
        """Serve an engine.

        Args:
            index: answers from its documents under a name of its own; None for none.
            name: what clients call the model; None for its own name, or its file's or folder's.
            usual: settings of requests that do not give their own; None for the defaults.
            max_spaces: most engines of tenants and salts that may be open.
        """
        self.engine = engine
        self.name = name or public_name(engine.model.name)
        self.index = index
        self.tenants = Tenants(engine, max_spaces)
        self.metrics = Metrics(engine)
        self._defaults = usual or GenerationConfig()
        self._asked: set[Asked] = set()

    @property
    def num_open(self) -> int:
        """Number of requests that are not answered yet."""
        return len(self._asked)

    def close(self) -> None:
        """End all requests."""
        for asked in list(self._asked):
            self.finish(asked)
        self.tenants.close()

    # Answers ---------------------------------------------------------------------------------

    def ask(self, request: ChatRequest | CompletionRequest, tenant: str) -> Asked:
        """Begin to answer a request; `answer` or `chunks` has the answers.

        Raises:
            CachedRAGError: it cannot be served; see `Engine.generate`.
        """
        self._check_count(len(request.prompts()) * (request.n or 1))
        config = self._defaults.replace(**request.options())
        is_chat, count, found = isinstance(request, ChatRequest), request.n or 1, None
        with ExitStack() as lease:
            engine = lease.enter_context(self.tenants.using(tenant, request.cache_salt))
            tools = Tools(engine.tokenization, **request.form())
            config = tools.settings(config)
            if isinstance(request, ChatRequest) and self.index and request.model == self.index.name:
                streams, found = self._searched(self.index, request, tools, config)
            elif isinstance(request, ChatRequest) and (meant := request.retrieval()):
                raise ConfigError(
                    f"{request.model} has no documents to choose by {' and '.join(meant)}; "
                    "leave this out, or ask an index"
                )
            else:
                streams = []
                for prompt in map(tools.prompt, request.prompts()):
                    fitting = self._fitting(request, prompt, config)
                    numbered = (_nth(fitting, n) for n in range(count))
                    streams += [engine.stream(prompt, one, tenant=tenant) for one in numbered]
            envelope = Envelope(request.model, is_chat, engine.tokenization, count, found)
            options = request.stream_options
            counts = bool(options and options.include_usage)
            asked = Asked(streams, tools, envelope, counts, lease.pop_all())
        self._asked.add(asked)
        return asked

    def _check_count(self, count: int) -> None:
        """Refuse what finds no room in an empty queue, so that asking again later is no use."""
        batch = self.engine.scheduler.config
        if batch.max_waiting is not None and count > batch.max_rows + batch.max_waiting:
            raise ConfigError(
                f"prompts times n are {count} answers, and this server takes "
                f"{batch.max_rows + batch.max_waiting} at most; send fewer in one request, or "
                "serve with a higher --max-waiting"
            )

    def _searched(
        self, index: ServedIndex, request: ChatRequest, tools: Tools, config: GenerationConfig
    ) -> tuple[list[Stream], list[Json]]:
        """Answers from the index, and the chunks that they are given.

        As in `_fitting`, the default length is cut to what fits.
        """
        asks_template = request.chat_template_kwargs or request.think is not None
        if tools.is_offered or request.cache_salt or asks_template:
            raise ConfigError(
                f"{index.name} takes neither tools nor a cache_salt, chat_template_kwargs or think"
            )
        [messages] = request.prompts()
        if request.temperature is None and (request.n or 1) == 1:
            config = config.replace(temperature=0.0)  # as `CachedRAG.ask`
        configs = [_nth(config, n) for n in range(request.n or 1)]
        may_be_shorter = request.wanted_tokens is None
        found = index.streams(messages, configs, request.retrieval(), may_be_shorter=may_be_shorter)
        return [answer.stream for answer in found], sources(found[0].sources)

    async def answer(self, asked: Asked) -> Json:
        """The whole response. Errors as `Engine.generate`."""
        try:
            await asyncio.gather(*(stream.atext() for stream in asked.streams))
            answers = [stream.generation for stream in asked.streams]
            return asked.envelope.response(answers, asked.tools)
        finally:
            self.finish(asked)

    async def chunks(self, asked: Asked) -> AsyncIterator[Json]:
        """The response in chunks; those of several prompts are mixed, as they come.

        Errors as `Engine.generate`; only that of a later prompt may come after the first chunk.
        """
        # Bounded, for a client may read more slowly than chunks are made.
        arrived: asyncio.Queue[Json | BaseException | None] = asyncio.Queue(_AHEAD)

        async def follow(index: int, stream: Stream) -> None:
            growing, noted = asked.tools.growing(), 0

            async def tell(piece: str, *, is_over: bool = False) -> None:
                nonlocal noted
                said, parts = growing.push(piece, is_over=is_over)
                now = stream.logprobs[noted:]  # more may come at any moment
                noted += len(now)
                thought = growing.new_thought
                if said or parts or now or thought:
                    await arrived.put(asked.envelope.piece(index, said, parts, now, thought))

            try:
                async with aclosing(stream.apieces()) as pieces:
                    first = await anext(pieces, "")  # an empty answer has a role and sources, too
                    await arrived.put(asked.envelope.opening(index))
                    await tell(first)
                    async for piece in pieces:
                        await tell(piece)
                await tell("", is_over=True)
                reason = ended(stream.finish_reason, has_calls=growing.has_calls)
                await arrived.put(asked.envelope.closing(index, reason))
                await arrived.put(None)
            except Exception as error:
                await arrived.put(error)

        tasks = [asyncio.create_task(follow(*item)) for item in enumerate(asked.streams)]
        try:
            left = len(tasks)
            while left:
                item = await arrived.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
            if asked.counts_usage:
                yield asked.envelope.counted([stream.report for stream in asked.streams])
        finally:
            for task in tasks:
                task.cancel()
            self.finish(asked)

    def finish(self, asked: Asked) -> None:
        """End a request, whether it is answered or given up; a second call changes nothing."""
        if asked in self._asked:
            self._asked.remove(asked)
            for stream in asked.streams:
                stream.cancel()
                # The report of one that is given up has no numbers before the pass under way ends.
                report = replace(stream.report, output_tokens=len(stream.token_ids))
                is_whole = report.total_ms > 0 and stream.finish_reason in ("stop", "length")
                self.metrics.answered(report, is_whole=is_whole)
            asked.lease.close()

    def _fitting(
        self, request: ChatRequest | CompletionRequest, prompt: Rendered, config: GenerationConfig
    ) -> GenerationConfig:
        """The settings; if the client gives no length, its default is cut to what fits.

        Raises:
            ContextOverflowError: not even one token fits.
        """
        context = self.engine.model.context_length
        surely = len(prompt.text.encode()) + 1  # a token is a byte at least, and BOS is one more
        if request.wanted_tokens is not None or surely + config.max_tokens <= context:
            return config
        # A prompt that is much too long is not tokenised whole: each character takes time.
        too_long = self.engine.tokenization.least_tokens(prompt.text, context) is not None
        room = 0 if too_long else context - self.engine.count_tokens(prompt)
        if room < 1:
            raise ContextOverflowError(f"the prompt fills the model's context of {context} tokens")
        return config.replace(max_tokens=min(config.max_tokens, room))


def _nth(config: GenerationConfig, n: int) -> GenerationConfig:
    """The settings of the n-th answer to one prompt: with a seed, each has its own."""
    if config.seed is None or not n:
        return config
    return config.replace(seed=(config.seed + n) % (1 << 63))
