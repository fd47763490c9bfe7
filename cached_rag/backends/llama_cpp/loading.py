"""Loads a GGUF with llama.cpp. What the backend relies on is tried before anything does.

That is: how states are laid out, how keys depend on position, and whether KV that is put together
gives what llama.cpp computes itself. Where it does not, as where layers are recurrent, states are
kept as a whole, and it is tried that a prompt goes on from them. With weights in few bits llama.cpp
rounds activations to 8 bits, so two equal computations may differ a little.
"""

import ctypes
import math
import os
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import TokenizersBackend

from cached_rag.backends.llama_cpp import api
from cached_rag.backends.llama_cpp.assembly import Assembly
from cached_rag.backends.llama_cpp.context import LlamaContext, Work
from cached_rag.backends.llama_cpp.model import LlamaCppModel
from cached_rag.backends.llama_cpp.state_format import Dims, StateFormat
from cached_rag.backends.llama_cpp.watch import Attention, Found
from cached_rag.backends.machine import OVERHEAD_BYTES, free_bytes
from cached_rag.backends.resolve import WHOLE, ModelSource, made, put_together, resolve, split_files
from cached_rag.backends.transformers.gguf import convert_tokenizer
from cached_rag.backends.transformers.gguf_rope import ROTATIONS
from cached_rag.backends.transformers.kernels import Chunks, Scoring
from cached_rag.backends.untrusted import BoundedReader, judged
from cached_rag.errors import ConfigError, ModelError, ModelNotFoundError
from cached_rag.kv import fingerprint
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.layers import Layered, by_layer, each
from cached_rag.kv.positions import LayerRule, PositionRule, match_rule

# Part of the fingerprint: raised when the same tokens would get other KV than before.
_KV_VERSION = 1
# Seen on two cores behind 4000 tokens: a step of one token 32 ms, of two 63, of four 102. On a GPU
# weights are read once for all of them.
_CPU_PRICE, _GPU_PRICE = 0.9, 0.1
# Texts that both tokenizers must cut alike.
_TEXTS = (
    "Hello, World! It's 3 o'clock.",
    "  two  spaces,\n\n\ttabs\nand 1234567.89 numbers",
    "naïve café — “quotes” … 東京で 🙂 Ωμέγα",
    "def f(x):\n    return {'a': [x ** 2, None]}  # 100%",
)
# llama.cpp's base where a file has none, also of layers with a sliding window.
_BASE = 10_000.0
Frequencies = list[tuple[float, ...]]
# YaRN's turns within the original context (`_yarn_share`), unless a file has others.
_FAST, _SLOW = 32.0, 1.0
_PROBE_TOKENS = 24
# How far keys are moved, in positions. Scaled frequencies differ little over a short distance, and
# by whole turns, perhaps, over a long one; so a rule has to hold over both.
_NEAR, _FAR = 300, 10_000
# Largest error of moved keys, as a share of a pair of dimensions' size. Rounding to 8 bits causes
# up to a fifth of that; a wrong rule gives about 1 (tests/backends/test_llama_backend.py has both).
_TOLERANCE = 0.25
# Most that logits over KV that was put in may differ, in nats, and as a share of what wrong KV
# does. Nothing is rounded on that way, but sums are taken in another order, and a last bit that
# differs may round an activation to another of 255 values: .002 to .005 were seen. A model whose
# answer hangs on one token alone shows neither; below the last number there is no difference.
_PARTS_TOLERANCE, _PARTS_SHARE, _NOTHING = 0.03, 0.1, 1e-6


@judged
def load_llama_cpp(name: str, threads: int | None = None, *, on_gpu: bool = False) -> LlamaCppModel:
    """Load a GGUF with llama.cpp.

    Args:
        name: an alias that stands for a GGUF, or a .gguf file.
        threads: of prefill and decoding; None for torch's number.
        on_gpu: compute all layers on the GPU that the build of llama.cpp is made for.

    Raises:
        ConfigError: it is no GGUF.
        ModelNotFoundError: there is no such file, or it has no tokenizer that transformers knows.
        MissingPackageError: llama.cpp is not installed.
        ModelError: the file is damaged, of no decoder, or does not fit in memory; or a GPU is
            wanted and the build has none.
    """
    library, source = api.load(), gguf_source(name)
    if on_gpu and not library.llama_supports_gpu_offload():
        raise ModelError(
            "this build of llama.cpp computes on the CPU only; leave device out, or install a "
            "build for your GPU (docs/llama_cpp.md)"
        )
    path = whole_file(source)
    files = split_files(path)
    _check_memory(name, files)
    reader = FileOutline(path)  # first, for llama.cpp ends the process over some files
    reader.tensors += [one for file in files[1:] for one in FileOutline(file).tensors]
    if reader.number("pooling_type", 0) > 0 or not reader.number("attention.causal", 1):
        raise _no_decoder(name, "it makes embeddings, or tokens see later ones")
    params = api.default_params(library, api.ModelParams)
    params.n_gpu_layers = -1 if on_gpu else 0
    params.load_mode = api.LOAD_MODE_NONE  # mapped, it would change with the file, or end with it
    handle = library.llama_model_load_from_file(os.fsencode(path), params)
    if not handle:
        raise ModelError(f"llama.cpp cannot load {path}; its messages in the log say why")
    context = LlamaContext(library, handle, threads or torch.get_num_threads())
    try:
        if library.llama_model_has_encoder(handle) or not library.llama_model_has_decoder(handle):
            raise _no_decoder(name, "it has an encoder")  # a pass would end the process
        context.least = max(context.least, reader.least_cells)
        context.sees_distance |= reader.number("attention.max_alibi_bias", 0) > 0
        vocab = library.llama_model_get_vocab(handle)
        tokenizer = tokenizer_of(source, path)
        size = context.vocab_size
        ids = probe_ids(library, vocab, size)
        even = library.llama_model_n_embd(handle) // max(1, library.llama_model_n_head(handle))
        rule, attention = examined(context, reader, reader.dims(even), ids)
        if gguf_source(name) != source:
            raise ModelError(f"{path} was changed while it was loaded; load it again")
        _check_tokenizer(library, vocab, tokenizer, name)
        kv_facts = {
            "version": _KV_VERSION,
            "weights": source.digest,
            "backend": f"{api.PACKAGE} {api.BUILD}",
            "tokenizer": fingerprint.digest(tokenizer.backend_tokenizer.to_str()),
            "dtype": str(context.shapes.dtype),
        }
        model = LlamaCppModel(
            name=name,
            context=context,
            tokenizer=tokenizer,
            rule=rule,
            fingerprint=fingerprint.model_fingerprint(kv_facts),
            context_length=library.llama_model_n_ctx_train(handle),
            eos_ids=frozenset(t for t in range(size) if library.llama_vocab_is_eog(vocab, t)),
            weights_bytes=library.llama_model_size(handle),
            num_weights=library.llama_model_n_params(handle),
            token_price=_GPU_PRICE if on_gpu else _CPU_PRICE,
            attention=attention,
        )
    except BaseException:
        context.close()
        raise
    # Not at the interpreter's end, when the model's thread may still compute.
    weakref.finalize(model, context.close).atexit = False
    return model


def _no_decoder(name: str, why: str) -> ModelError:
    return ModelError(f"{name} does not continue text: {why}. Give a model that answers")


def _check_memory(name: str, files: list[Path]) -> None:
    needed = sum(file.stat().st_size for file in files) + OVERHEAD_BYTES
    free = free_bytes("cpu")
    if needed > free:
        raise ModelError(
            f"{name} does not fit: its file and the first prompts take {needed / 2**30:.1f} GiB, "
            f"and {max(free, 0) / 2**30:.1f} GiB of memory are free. Free some, or use a smaller "
            "model or quantisation"
        )


def _check_tokenizer(library: ctypes.CDLL, vocab: int, tokenizer: Any, name: str) -> None:
    """See that transformers' tokenizer, which finds chunks, cuts texts as llama.cpp's does."""
    for text in _TEXTS:
        data, room = text.encode(), 4 * len(text) + 8
        ids = (ctypes.c_int32 * room)()
        count = library.llama_tokenize(vocab, data, len(data), ids, room, False, False)
        wanted = tokenizer.encode(text, add_special_tokens=False)
        if list(ids[: max(0, count)]) != wanted:
            raise ModelError(
                f"llama.cpp cuts {text!r} into other tokens than transformers does with the "
                f'tokenizer in {name}, so chunks could not be found; use backend="transformers"'
            )


def gguf_source(model: str) -> ModelSource:
    """The GGUF behind a model's name.

    Raises:
        ConfigError: the model is no GGUF file.
        ModelNotFoundError: there is no such file.
    """
    source = resolve(model)
    if not source.is_gguf:
        raise ConfigError(
            f"llama.cpp reads GGUF files, and {model} is none; give the same weights as one: a "
            ".gguf file"
        )
    return source


def whole_file(source: ModelSource) -> Path:
    """The one file. Pieces are joined once, in the user's cache directory.

    Raises:
        ModelError: the pieces are damaged, or the disk is full.
    """
    if not source.pieces:
        return Path(source.path)
    return made("gguf", source.digest, lambda folder: put_together(source, folder)) / WHOLE


def tokenizer_of(source: ModelSource, path: Path) -> Any:
    """The file's tokenizer as transformers has it; made once, in the user's cache directory.

    Args:
        path: the whole file.

    Raises:
        ModelNotFoundError: it has none that transformers knows.
    """
    try:
        folder = made("tokenizers", source.digest, lambda folder: convert_tokenizer(path, folder))
        return TokenizersBackend.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"cannot read the tokenizer in {path}: {error}") from error


class FileOutline(BoundedReader):
    """A GGUF's fields and tensors, without what is in lists, and what they say of KV and attention.

    Of a vocabulary of 150,000 tokens gguf's own reader makes objects that take 500 MB.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = int(self._get(orig_offs, np.uint32)[0])
        count = self._length(orig_offs)
        end = orig_offs + 12
        for _ in range(count):
            end += super()._get_field_parts(end, kind)[0]
        return end - orig_offs, [], [], [gguf.GGUFValueType.ARRAY]

    def tensor(self, name: str) -> torch.Tensor | None:
        """A tensor of numbers that are kept as they are; None if the file has none of that name."""
        found = (torch.tensor(one.data) for one in self.tensors if one.name == name)
        return next(found, None)

    def dims(self, head_dim: int) -> Dims:
        """What states do not say of their rows.

        Args:
            head_dim: a head's, unless the file says otherwise.
        """
        width = int(self.number("attention.key_length", head_dim))
        sliding = int(self.number("attention.key_length_swa", width))
        rotated = int(self.number("rope.dimension_count", 0)) or width
        is_latent = self.number("attention.key_length_mla", 0)
        return Dims((width, sliding), rotated if is_latent else 0)

    @property
    def least_cells(self) -> int:
        """With fewer cells llama.cpp would rotate otherwise (longrope)."""
        if self.tensor("rope_factors_long.weight") is None:
            return 0
        trained = self.number("context_length", 0)
        return int(self.number("rope.scaling.original_context_length", trained)) + 1

    def ways(self, layer: int) -> list[Scoring]:
        """How a layer may score the keys that a row sees, without its window."""
        sinks = self.tensor(f"blk.{layer}.attn_sinks.weight")
        softcap = self.number("attn_logit_softcapping", 0) or None
        scales = None, 1.0, self.number("attention.scale", 1.0)  # None is 1 / sqrt(head_dim)
        return [Scoring(scale, None, softcap, sinks) for scale in dict.fromkeys(scales)]


def frequencies_of(reader: FileOutline, head_dim: int) -> Frequencies:
    """Rotary frequencies that the file may mean: as they are, scaled, or with a factor each."""
    dim = int(reader.number("rope.dimension_count", 0)) or head_dim
    base = reader.number("rope.freq_base", _BASE)
    sliding = int(reader.number("attention.key_length_swa", dim))
    dims = dim, int(reader.number("rope.dimension_count_swa", sliding))
    bases = base, reader.number("rope.freq_base_swa", _BASE)
    pairs = dict.fromkeys((width, one) for width in dims for one in bases)
    found = [one for width, base in pairs for one in _frequencies(reader, width, base)]
    return list(dict.fromkeys(tuple(one.tolist()) for one in found if one.isfinite().all()))


def _frequencies(reader: FileOutline, dim: int, base: float) -> list[torch.Tensor]:
    """What a file may mean of so many rotated dimensions."""
    plain = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    scaled = plain / (reader.number("rope.scaling.factor", 1.0) or 1.0)
    found = [plain, scaled]
    fast = reader.number("rope.scaling.yarn_beta_fast", _FAST)
    slow = reader.number("rope.scaling.yarn_beta_slow", _SLOW)
    # llama.cpp reads these numbers for some architectures only.
    for turns in ((_FAST, _SLOW), (fast, slow)):
        kept = _yarn_share(reader, dim, base, *turns)
        found.append(kept * plain + (1 - kept) * scaled)
    for tensor in reader.tensors:
        if tensor.name in ROTATIONS:
            factors = torch.tensor(tensor.data, dtype=torch.float64).flatten()
            if len(factors) == len(plain):
                found += [plain / factors, scaled / factors]
    return found


def _yarn_share(
    reader: FileOutline, dim: int, base: float, fast: float, slow: float
) -> torch.Tensor:
    """YaRN: of each frequency, the share that is not scaled; (dim / 2,).

    It is 1 for those that turn more than `fast` times within the original context, 0 for those that
    turn less than `slow` times, and falls evenly between (arXiv 2309.00071, section 3.2).
    """
    trained = reader.number("context_length", 0.0)
    length = reader.number("rope.scaling.original_context_length", trained)
    turns = torch.tensor([fast, slow], dtype=torch.float64)
    bounds = dim * (length / (turns * 2 * torch.pi)).log() / (2 * math.log(max(base, 2.0)))
    first, last = bounds[0].floor().clamp(min=0), bounds[1].ceil().clamp(max=dim - 1)
    at = torch.arange(dim // 2, dtype=torch.float64)
    return 1 - ((at - first) / (last - first).clamp(min=0.001)).clamp(0, 1)


def probe_ids(library: ctypes.CDLL, vocab: int, size: int) -> list[int]:
    """Some tokens, spread over the vocabulary, none of which ends a text."""
    step = max(1, size // (2 * _PROBE_TOKENS))
    found = (token for token in range(step, size) if not library.llama_vocab_is_eog(vocab, token))
    return [token for n, token in enumerate(found) if n % step == 0][:_PROBE_TOKENS]


def examined(
    context: LlamaContext, reader: FileOutline, dims: Dims, ids: list[int]
) -> tuple[PositionRule, Attention | None]:
    """Learn the states' format, the rule by which keys are moved, and how attention is watched.

    Where states are not taken apart, the context has no format, and the rule the reason. Attention
    is not watched there, nor where it is not what this library takes it for.

    Args:
        ids: some tokens (`probe_ids`).

    Raises:
        ModelError: a prompt does not go on from a state that is put in whole; or no token follows.
    """
    context.resize(0)
    third, end = len(ids) // 3, len(ids) - 1
    trial = _Trial(context, ids, (0, third, 2 * third, end, end + 1))
    if bool((trial.logits == trial.logits[0]).all()):
        why = "to it all tokens are equally likely to come next, as to one that makes embeddings"
        raise _no_decoder(f"this {reader.architecture} model", why)
    try:
        if context.is_recurrent:
            raise ModelError("it has recurrent layers")
        context.format = StateFormat.of(trial.whole, dims)
        context.bytes_per_token = context.shapes.bytes_per_token
        with context.watch.over(range(context.shapes.num_layers), outputs=True) as found:
            here = trial.read(0)
        trial.check_parts(here)
    except ModelError as error:
        context.format, context.bytes_per_token = None, trial.bytes_per_token
        trial.check_whole()
        reason = f"llama.cpp's states are kept as a whole: {error}"
        return PositionRule(reason=reason), None
    rule = _rule(trial, reader, dims, here)
    return rule, None if dims.latent else _attention(context, reader, found, here)


def _attention(
    context: LlamaContext, reader: FileOutline, found: Found, kv: KVBuffer
) -> Attention | None:
    """How it is watched, learned from what was found in a pass, and the KV of its tokens."""
    assert context.format is not None
    kind = Chunks if reader.architecture == "llama4" else int
    second = kind(context.window) if context.window else None
    sections = enumerate(context.format.sections)  # the second one, if there is one, has a window
    windows = [second if at else None for at, one in sections for _ in range(one.layers)]
    ways = [reader.ways(layer) for layer in range(len(windows))]
    return Attention.of(context.watch, found, kv, ways, windows)


class _Trial:
    """Some tokens, computed in a few pieces: where they are cut changes the rounding.

    Attributes:
        logits: after the last of them.
        begun: the state behind the first piece.
        whole: the state behind all.
    """

    def __init__(self, context: LlamaContext, ids: list[int], cuts: tuple[int, ...]) -> None:
        self.context, self.ids, self.cuts = context, ids, cuts
        with context.opened() as own:
            self._append(own, cuts[:2])
            self.begun = context.state(own)
            self.logits = self._append(own, cuts[1:])
            self.whole = context.state(own)

    def _append(self, sequence: int, cuts: tuple[int, ...], shift: int = 0) -> torch.Tensor:
        for begin, end in pairwise(cuts):
            work = Work(sequence, self.ids[begin:end], begin + shift)
            logits = self.context.compute([work])[0]
        return logits

    @property
    def bytes_per_token(self) -> int:
        """Of a state; besides, it may have a part that does not grow."""
        more = len(self.ids) - self.cuts[1]
        return max(1, (len(self.whole) - len(self.begun)) // more)

    def read(self, begin: int) -> KVBuffer:
        """The KV of the tokens where they stand from position `begin` on."""
        buffer = KVBuffer.like(self.context.shapes, len(self.ids))
        with self.context.opened() as own:
            self._append(own, self.cuts, begin)
            self.context.read(own, begin, (buffer.keys[:, 0], buffer.values[:, 0]))
        return buffer

    def check_parts(self, here: KVBuffer) -> None:
        """See that tokens computed between KV that was put in give the logits of a plain prefill.

        Every other piece is put in. KV of other tokens, put in their place, must be noticed.

        Args:
            here: KV of a plain prefill.

        Raises:
            ModelError: they do not, or it is not noticed.
        """
        _, first, second, last, _ = self.cuts
        slots = [*range(first, second), *range(last, len(self.ids))]

        def logits(keys: Layered, values: Layered) -> torch.Tensor:
            buffer = KVBuffer(keys, values)
            with self.context.opened() as own:
                return Assembly(self.context, own, buffer, self.ids).fill(slots, 1)[0]

        def flipped(side: Layered) -> Layered:
            return each(side, lambda stack: stack.flip(3))

        right = logits(here.keys.clone(), here.values.clone())
        wrong = logits(flipped(here.keys), flipped(here.values))
        self._compare(right, wrong, "KV that is put together does not give what llama.cpp computes")

    def check_whole(self) -> None:
        """See that a prompt goes on from a state that is put in whole, and only from its own.

        Raises:
            ModelError: it does not.
        """
        begin = self.cuts[1]
        with self.context.opened() as other:
            self.context.compute([Work(other, self.ids[begin:0:-1], 0, 0)])
            others = self.context.state(other)

        def logits(state: torch.Tensor) -> torch.Tensor:
            with self.context.opened() as own:
                self.context.restore(own, state, begin)
                return self._append(own, self.cuts[1:])

        what = "a prompt does not go on from its state"
        self._compare(logits(self.begun), logits(others), what)

    def _compare(self, right: torch.Tensor, wrong: torch.Tensor, what: str) -> None:
        error, control = (_distance(found, self.logits) for found in (right, wrong))
        if not error <= max(_NOTHING, min(_PARTS_TOLERANCE, _PARTS_SHARE * control)):
            raise ModelError(f"{what} (error {error:.1e}, wrong KV {control:.1e})")


def _rule(trial: _Trial, reader: FileOutline, dims: Dims, here: KVBuffer) -> PositionRule:
    """How keys, and what of latents is rotated, depend on position: from three places."""
    if reader.tensor("position_embd.weight") is not None:
        # llama.cpp ends the process beyond the last one
        return PositionRule(reason="positions are added to the embeddings (learned positions)")
    there = {delta: trial.read(delta) for delta in (_NEAR, _FAR)}
    frequencies = frequencies_of(reader, dims.heads[0])
    found: dict[str, list[LayerRule]] = {"keys": [], "values": []}
    for side in ("keys", "values") if dims.latent else ("keys",):
        before = by_layer(getattr(here, side)[:, 0])
        after = {delta: by_layer(getattr(kv, side)[:, 0]) for delta, kv in there.items()}
        for layer in range(len(before)):
            moved = {delta: kv[layer] for delta, kv in after.items()}
            rule = match_rule(before[layer], moved, frequencies, _TOLERANCE)
            if rule is None:
                return PositionRule(
                    reason="no known rotation explains how llama.cpp's keys of "
                    f"{reader.architecture} models move (layer {layer})"
                )
            found[side].append(rule)
    return PositionRule(tuple(found["keys"]), values=tuple(found["values"]))


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The Kullback-Leibler divergence between next-token distributions, in nats."""
    wanted = expected.double().log_softmax(-1)
    return float((wanted.exp() * (wanted - found.double().log_softmax(-1))).sum())
