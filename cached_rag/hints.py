"""What settings of other programs are called here. Knows names only."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

_ENGINE = "the model runs in this process, and no server is asked; leave it out"
_STAYS = "the model stays loaded as long as this object; leave it out"
_CONTEXT = "the context is the model's own, and takes memory only as prompts need it; leave it out"
_DEVICE = 'use device="cuda" or "cpu" (with llama.cpp "gpu"), which then has all layers'
_THREADS = "set the environment variable OMP_NUM_THREADS before the program starts"
_MODEL = "use model=: an alias, hub id, folder or GGUF file"
_LENGTH = "use max_tokens="
_OPTIONS = "give what is in it as settings of its own, such as max_tokens="
_FORM = "bind it: with_structured_output, as_structured_llm (docs/tools.md)"
HINTS = {
    **dict.fromkeys(("num_ctx", "n_ctx", "max_model_len"), _CONTEXT),
    **dict.fromkeys(("num_predict", "max_new_tokens", "max_completion_tokens"), _LENGTH),
    **dict.fromkeys(("base_url", "api_base", "request_timeout", "client_kwargs"), _ENGINE),
    **dict.fromkeys(("api_key", "timeout", "max_retries"), _ENGINE),
    **dict.fromkeys(("num_gpu", "n_gpu_layers", "device_map"), _DEVICE),
    **dict.fromkeys(("num_thread", "n_threads"), _THREADS),
    **dict.fromkeys(("model_id", "model_path", "model_name", "tokenizer_name"), _MODEL),
    **dict.fromkeys(("pipeline_kwargs", "generate_kwargs", "additional_kwargs"), _OPTIONS),
    **dict.fromkeys(("format", "json_mode"), _FORM),
    "context_window": _CONTEXT,
    "keep_alive": _STAYS,
    "repeat_penalty": "use repetition_penalty=",
    "do_sample": "use temperature=, where 0 does not sample",
    "reasoning": 'use chat_template_kwargs={"enable_thinking": False}, or what the template has',
    "thinking": 'use chat_template_kwargs={"enable_thinking": False}, or what the template has',
    "task": "text is generated in any case; leave it out",
    "pipeline": "give wrap_model(model, tokenizer, name=...) to Engine(), and that as engine=",
    "n_batch": "BatchConfig.prefill_tokens is alike; leave it out",
}


def unknown_settings(names: Iterable[str], known: Collection[str]) -> str:
    """A sentence on settings that do not exist: what each is called here, or which there are."""
    hints = {name: HINTS.get(name) or _near(name, known) for name in names}
    said = "; ".join(f"{name!r}: {hint}" if hint else repr(name) for name, hint in hints.items())
    listed = "" if all(hints.values()) else f"; settings are {', '.join(known)}"
    return f"unknown setting {said}{listed}"


def _near(name: str, known: Collection[str]) -> str:
    found = get_close_matches(name, known, n=1)
    return f"did you mean {found[0]}?" if found else ""
