"""llama.cpp's C API, as one build of xllamacpp exports it. Declares and checks; decides nothing.

The wheel brings the library without its headers, and llama.cpp changes the structs that it takes by
value from build to build: a wrong layout reads and writes memory that belongs to others. So one
build is pinned, and `load` refuses a library whose default parameters do not read as expected.
Field names are those of `llama.h`.
"""

import atexit
import ctypes
import functools
import logging
import sys
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from cached_rag.backends.resolve import wheel_file
from cached_rag.errors import MissingPackageError, ModelError

PACKAGE, BUILD = "xllamacpp", "2026.10.11549"
# Of `enum llama_load_mode`: read the file into memory.
LOAD_MODE_NONE = 0
_log = logging.getLogger(__name__)
_LEVELS = {3: logging.WARNING, 4: logging.ERROR}  # of `enum ggml_log_level`; the others say little
# How warnings begin that are none: a context says at its end that it took what it reserved, and at
# its beginning that it has more cells than one prompt may have; they are for several prompts. And
# it marks a control token that Qwen's files leave unmarked.
_CHATTER = (b"~llama_context", b"llama_context: n_ctx", b"load: control-looking token")
# More than any struct has grown by: a library with a longer struct than ours fills this, not memory
# that is not ours, and is then refused.
_ROOM = 512


# The declarations of these structs' fields: name, type, and what the pinned build has by default,
# where that is not 0, false or null.
Fields = tuple[tuple[Any, ...], ...]


class ModelParams(Structure):
    """`struct llama_model_params`."""

    defaults = "llama_model_default_params"
    declared: ClassVar[Fields] = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32, -1),
        ("split_mode", c_int32, 1),
        ("load_mode", c_int32, -1),
        ("lazy_mode", c_int32, 1),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool, True),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )
    _fields_ = tuple(one[:2] for one in declared)


class ContextParams(Structure):
    """`struct llama_context_params`."""

    defaults = "llama_context_default_params"
    declared: ClassVar[Fields] = (
        ("n_ctx", c_uint32, 512),
        ("n_batch", c_uint32, 2048),
        ("n_ubatch", c_uint32, 512),
        ("n_seq_max", c_uint32, 1),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32, 1),
        ("n_threads", c_int32, 4),
        ("n_threads_batch", c_int32, 4),
        ("ctx_type", c_int32),
        ("rope_scaling_type", c_int32, -1),
        ("pooling_type", c_int32, -1),
        ("attention_type", c_int32, -1),
        ("flash_attn_type", c_int32, -1),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float, -1),
        ("yarn_attn_factor", c_float, -1),
        ("yarn_beta_fast", c_float, -1),
        ("yarn_beta_slow", c_float, -1),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float, -1),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32, 1),
        ("type_v", c_int32, 1),
        ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool, True),
        ("no_perf", c_bool, True),
        ("op_offload", c_bool, True),
        ("swa_full", c_bool, True),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )
    _fields_ = tuple(one[:2] for one in declared)


class BatchStruct(Structure):
    """`struct llama_batch`."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


Params = TypeVar("Params", ModelParams, ContextParams)

# Result and arguments. Models, contexts, vocabularies and memories are handles: pointers to structs
# that only llama.cpp looks into.
_HANDLE = c_void_p
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_log_set": (None, (c_void_p, c_void_p)),
    "llama_backend_init": (None, ()),
    "llama_supports_gpu_offload": (c_bool, ()),
    "llama_model_load_from_file": (_HANDLE, (c_char_p, ModelParams)),
    "llama_model_free": (None, (_HANDLE,)),
    "llama_model_get_vocab": (_HANDLE, (_HANDLE,)),
    "llama_model_n_head": (c_int32, (_HANDLE,)),
    "llama_model_n_embd": (c_int32, (_HANDLE,)),
    "llama_model_n_swa": (c_int32, (_HANDLE,)),
    "llama_model_n_ctx_train": (c_int32, (_HANDLE,)),
    "llama_model_size": (c_uint64, (_HANDLE,)),
    "llama_model_n_params": (c_uint64, (_HANDLE,)),
    "llama_model_has_encoder": (c_bool, (_HANDLE,)),
    "llama_model_has_decoder": (c_bool, (_HANDLE,)),
    "llama_model_is_recurrent": (c_bool, (_HANDLE,)),
    "llama_model_is_hybrid": (c_bool, (_HANDLE,)),
    "llama_vocab_n_tokens": (c_int32, (_HANDLE,)),
    "llama_vocab_is_eog": (c_bool, (_HANDLE, c_int32)),
    "llama_tokenize": (
        c_int32,
        (_HANDLE, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool),
    ),
    "llama_init_from_model": (_HANDLE, (_HANDLE, ContextParams)),
    "llama_free": (None, (_HANDLE,)),
    "llama_get_memory": (_HANDLE, (_HANDLE,)),
    "llama_memory_seq_rm": (c_bool, (_HANDLE, c_int32, c_int32, c_int32)),
    "llama_memory_seq_cp": (None, (_HANDLE, c_int32, c_int32, c_int32, c_int32)),
    "llama_state_seq_get_size": (c_size_t, (_HANDLE, c_int32)),
    "llama_state_seq_get_data": (c_size_t, (_HANDLE, c_void_p, c_size_t, c_int32)),
    "llama_state_seq_set_data": (c_size_t, (_HANDLE, c_void_p, c_size_t, c_int32)),
    "llama_decode": (c_int32, (_HANDLE, BatchStruct)),
    "llama_get_logits_ith": (POINTER(c_float), (_HANDLE, c_int32)),
    "ggml_get_name": (c_char_p, (_HANDLE,)),
    "ggml_nbytes": (c_size_t, (_HANDLE,)),
    "ggml_nelements": (c_int64, (_HANDLE,)),
    "ggml_backend_tensor_get": (None, (_HANDLE, c_void_p, c_size_t, c_size_t)),
}


@functools.cache
def load() -> ctypes.CDLL:
    """The library, with all functions declared, and initialised.

    Calls release the interpreter's lock. Handles and lengths are the caller's to check.

    Raises:
        MissingPackageError: xllamacpp is not installed.
        ModelError: it is another build, or its structs are not laid out as declared here.
    """
    library = ctypes.CDLL(str(_pinned_file()))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name, None)
        if function is None:
            raise ModelError(_refused(f"it has no function {name}"))
        function.restype, function.argtypes = result, arguments
    for params in (default_params(library, ModelParams), default_params(library, ContextParams)):
        if found := unlike_defaults(params):
            raise ModelError(_refused(f"its defaults read {found}"))
    library.llama_log_set(_PASS_ON, None)
    atexit.register(library.llama_log_set, None, None)  # it may still log when Python has ended
    library.llama_backend_init()
    return library


def default_params(library: ctypes.CDLL, kind: type[Params]) -> Params:
    """llama.cpp's default parameters, to be changed and passed on."""
    fields = (("params", kind), ("room", c_int8 * _ROOM))
    function = library[kind.defaults]  # by index: a function object of its own, with its own result
    function.restype = type("Returned", (Structure,), {"_fields_": fields})
    found: Params = function().params
    return found


def unlike_defaults(params: ModelParams | ContextParams) -> str:
    """Fields that do not have the pinned build's defaults, as text; empty if all have them."""
    wrong = []
    for name, _, *expected in params.declared:
        value = getattr(params, name) or 0
        if value != (expected[0] if expected else 0):
            wrong.append(f"{name} = {value}")
    return ", ".join(wrong)


def _pinned_file() -> Path:
    """The installed package's library; the package itself is not imported."""
    suffix = ".pyd" if sys.platform == "win32" else ".so"
    path = wheel_file(PACKAGE, suffix)
    if path is None:
        missing = ModuleNotFoundError(f"No package named {PACKAGE!r}")
        raise MissingPackageError("llama.cpp", "llama-cpp", missing)
    if (version := metadata.version(PACKAGE)) != BUILD:
        raise ModelError(_refused(f"it is {PACKAGE} {version}"))
    return path


def _refused(why: str) -> str:
    return (
        f"this build of llama.cpp cannot be used: {why}, and its structs may be laid out "
        f"differently, which would damage memory. Install the one that was checked: "
        f"pip install --no-deps {PACKAGE}=={BUILD}"
    )


def _pass_on(level: int, text: bytes, _: object) -> None:
    """Pass llama.cpp's warnings and errors on to Python's logging."""
    if level in _LEVELS and not text.startswith(_CHATTER):
        _log.log(_LEVELS[level], "%s", text.decode(errors="replace").strip())


_PASS_ON = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)(_pass_on)
