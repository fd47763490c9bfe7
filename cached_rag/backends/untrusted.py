"""Model files are untrusted: what they claim is bounded before work, all failures are one error.

What they say to be done, such as a chat template, is called within bounds of time and memory: a
template runs in a sandbox, which nested loops make run for years and doubled texts fill the memory
from. Whoever renders is watched from another thread, and stopped. Knows no template.
"""

import ctypes
import functools
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import gguf
import numpy as np
import psutil
import torch
from transformers import PreTrainedConfig
from transformers.modeling_gguf_pytorch_utils import read_field
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from cached_rag.errors import CachedRAGError, ConfigError, ModelError

_P = ParamSpec("_P")
_T = TypeVar("_T")
# Most of what is made one by one when a model is built, by how configurations and GGUFs name it.
# The largest models have some 130 layers and 400 experts; llama.cpp ends the process beyond 512.
_MOST = {
    re.compile(r"(^|[_.])(n_?)?(layers?|depth|blocks|block_count)$"): 512,
    re.compile(r"(^|[_.])(experts|expert_count)$"): 512,
    re.compile(r"(^|[_.])(labels|codebooks)$"): 1 << 16,
}
# Most entries of a list in a GGUF: each becomes an object. The longest have some 500,000.
_MOST_ENTRIES = 1 << 21
# A prompt is rendered in milliseconds; a slow machine that does much else needs some seconds.
SECONDS = 20.0
# What a prompt of tens of millions of characters takes.
BYTES = 1 << 30
# How often it is looked at; most calls are over before the first time.
_LOOK_SECONDS = 0.1


def judged(load: Callable[_P, _T]) -> Callable[_P, _T]:
    """Have a function that loads a model, named by its first argument, raise this library's errors.

    Readers raise what they come to: SafetensorError, UnpicklingError, KeyError, ZeroDivisionError.
    """

    @functools.wraps(load)
    def loading(*args: _P.args, **options: _P.kwargs) -> _T:
        try:
            return load(*args, **options)
        except (CachedRAGError, NameError):  # the latter is a fault of code, not of files
            raise
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise ModelError(
                f"memory ran out while a model was loaded ({error}); free some, or take a smaller "
                "model, a GGUF in 4 bits, or a machine with more memory"
            ) from error
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
                raise
            name = args[0] if args else options.get("name")
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ModelError(
                f"cannot load {name} ({why}): its files are damaged, or not what they seem; "
                "download them again, from whom you trust"
            ) from error

    return loading


def check_config(path: str, **options: Any) -> None:
    """Judge a configuration before transformers makes an object of it, which may take for ever.

    Args:
        options: of `from_pretrained`, which say where it is.

    Raises:
        ModelError: it says that weights are quantised in a way that is not read here.
        ValueError: it asks for too many layers, or the like.
        OSError: there is none.
    """
    facts = PreTrainedConfig.get_config_dict(path, **options)[0]
    check_counts(facts)
    method = (facts.get("quantization_config") or {}).get("quant_method")
    if method is not None and method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ModelError(
            f"{path} is quantised as {method}, which is not read here; use the model that it was "
            "made from, or a GGUF of it"
        )


def check_counts(facts: Mapping[str, Any]) -> None:
    """Raise a ValueError if there is too much of something that is made one by one."""
    for key, value in facts.items():
        if isinstance(value, Mapping):
            check_counts(value)
        elif isinstance(value, int | float):
            for pattern, most in _MOST.items():
                if value > most and pattern.search(key):
                    raise ValueError(f"{key} is {value}, and no model has more than {most}")


class BoundedReader(gguf.GGUFReader):  # type: ignore[misc]
    """gguf's reader; that reads on behind a file's end, for ever where a count says so.

    Raises:
        ValueError: a count exceeds the file, or what any model has; or tensors overlap.
    """

    @property
    def architecture(self) -> str:
        """Such as "llama"."""
        return str(read_field(self, "general.architecture")[0])

    def number(self, key: str, otherwise: float) -> float:
        """A number that the file says of its architecture, by its name there."""
        found = read_field(self, f"{self.architecture}.{key}")
        return float(found[0] if found else otherwise)

    def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **named: Any) -> Any:
        if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError("it is cut short, or a count in it is wrong")
        return super()._get(offset, dtype, count, *order, **named)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == gguf.GGUFValueType.ARRAY:
            self._length(orig_offs)
        return super()._get_field_parts(orig_offs, raw_type)

    def _length(self, offset: int) -> int:
        """How many entries the list has that begins there."""
        count = int(self._get(offset + 4, np.uint64)[0])
        if count > _MOST_ENTRIES:
            raise ValueError(f"it has a list of {count} entries")
        return count

    def _build_tensor_info(self, offs: int, count: int) -> Any:
        counts = {
            key: int(field.parts[-1][0])
            for key, field in self.fields.items()
            if len(field.types) == 1 and "INT" in field.types[0].name
        }
        check_counts(counts)
        kinds = "count", "used_count", "group_count", "group_used_count"
        numbers = {key.rpartition(".expert_")[2]: number for key, number in counts.items()}
        given = [numbers.get(kind, 0) for kind in kinds]
        experts, used, groups, chosen = given
        fits = (0 < used <= experts and groups < experts) if experts else not used and not groups
        if groups > 1:
            fits &= experts % groups == 0 and 0 < chosen < groups
        if not fits:  # over these, too, llama.cpp ends the process
            raise ValueError(f"its numbers of experts do not fit each other: {given}")
        return super()._build_tensor_info(offs, count)

    def _build_tensors(self, start_offs: int, fields: Any) -> None:
        super()._build_tensors(start_offs, fields)
        if sum(int(tensor.n_bytes) for tensor in self.tensors) > len(self.data):
            raise ValueError("its tensors overlap")


class _Stopped(BaseException):
    """Raised in the thread that is watched; no handler of errors of the work catches it."""


def bounded(what: str, work: Callable[[], str]) -> str:
    """What `work` returns. It must run no locks and change nothing, as it may end anywhere.

    It is stopped between two steps of Python: a single one, such as a text times a number, ends
    first.

    Args:
        what: says what works here, as in "the model's chat template".

    Raises:
        ConfigError: it takes too long, or the process grows too much meanwhile.
        As `work` does.
    """
    is_over, lock, reasons = threading.Event(), threading.Lock(), list[str]()
    arguments = (threading.get_ident(), is_over, lock, reasons)
    watch = threading.Thread(target=_watch, args=arguments, daemon=True)
    try:
        try:
            watch.start()
            found = work()
        finally:
            with lock:  # then nothing is raised here any more
                is_over.set()
    except _Stopped as error:
        raise ConfigError(
            f"{what} {reasons[0]} and was stopped; give the prompt as one string, or use another "
            "template or model"
        ) from error
    return found


def _watch(thread: int, is_over: threading.Event, lock: threading.Lock, reasons: list[str]) -> None:
    """Stop a thread once it has worked too long or taken too much memory."""
    memory, begin = psutil.Process().memory_info, time.monotonic()
    before: int | None = None
    while not is_over.wait(_LOOK_SECONDS):
        before = memory().rss if before is None else before
        if time.monotonic() - begin > SECONDS:
            reasons.append(f"takes more than {SECONDS:g} s")
        elif memory().rss - before > BYTES:
            reasons.append(f"takes more than {BYTES} bytes of memory")
        else:
            continue
        with lock:
            if not is_over.is_set():
                stop = ctypes.py_object(_Stopped)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), stop)
        return
