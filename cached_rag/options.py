"""Settings by name: what a class of settings has, and what those of other programs are called here.

A setting stands once, as a field of a frozen dataclass, with its help in the class's docstring. The
command line, keyword arguments and the fields of the frameworks' models are made from that.
"""

import inspect
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from cached_rag.errors import ConfigError

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
    "pipeline": "give Engine(wrap_model(model, tokenizer, name=..., revision=...)) as engine=",
    "n_batch": "BatchConfig.prefill_tokens is alike; leave it out",
}

# Of longer names nothing is near: comparing takes the product of the lengths in time.
_COMPARED = 250
# How alike a name must be: below this are words that share some letters, such as other programs'.
_LIKE = 0.75
# What settings of Python's own types may be given as, and the words for it.
_KINDS: dict[type, tuple[type[Any], str]] = {
    int: (Real, "a whole number"),
    float: (Real, "a number"),
    bool: (bool, "True or False"),
    str: (str, "a string"),
}


def unknown_settings(names: Iterable[str], known: Collection[str]) -> str:
    """A sentence on settings that do not exist: what each is called here, or which there are."""
    hints = {
        name: HINTS.get(name) or "".join(f"did you mean {one}?" for one in near(name, known))
        for name in names
    }
    said = "; ".join(f"{name!r}: {hint}" if hint else repr(name) for name, hint in hints.items())
    listed = "" if all(hints.values()) else f"; settings are {', '.join(known)}"
    return f"unknown setting {said}{listed}"


def near(name: str, known: Iterable[str]) -> list[str]:
    """The known name that is spelled most like a name, if one is; of a long one, none."""
    if len(name) > _COMPARED:
        return []
    found = get_close_matches(name, list(known), 3, _LIKE)
    # The same letters in another order come first: of `prot`, `port` and not `prompt`.
    return sorted(found, key=lambda one: sorted(one) != sorted(name))[:1]


@dataclass(frozen=True)
class Setting:
    """A field of a class of settings.

    Attributes:
        help: what the class's docstring says of it.
    """

    name: str
    type: Any
    default: Any
    help: str


def settings_of(*kinds: type) -> dict[str, Setting]:
    """The settings of classes, all with defaults, by name; of one that two have, the first's."""
    found: dict[str, Setting] = {}
    for kind in kinds:
        types, texts = get_type_hints(kind), _documented(kind)
        for one in fields(kind):
            setting = Setting(one.name, types[one.name], one.default, texts.get(one.name, ""))
            found.setdefault(one.name, setting)
    return found


def parted(
    options: Mapping[str, Any], *kinds: type, beside: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Options by name as those of each class; a name that two classes have is for both.

    Args:
        beside: names that are no options, and that one may have meant.

    Raises:
        ConfigError: no class has such a setting.
    """
    names = [[one.name for one in fields(kind)] for kind in kinds]
    known = list(dict.fromkeys(name for group in names for name in group))
    if unknown := [name for name in options if name not in known]:
        raise ConfigError(unknown_settings(unknown, [*beside, *known]))
    return [{name: options[name] for name in group if name in options} for group in names]


def check_types(settings: Any) -> None:
    """Check settings of Python's own types, and make numbers of other libraries such ones.

    Raises:
        ConfigError: one is of another type.
    """
    for name, (kind, may_lack) in _kinds(settings.__class__).items():
        given = getattr(settings, name)
        if may_lack and given is None:
            continue
        abstract, words = _KINDS[kind]
        is_one = isinstance(given, abstract) and isinstance(given, bool) == (kind is bool)
        is_sane = is_one and given == given and (kind is not int or given % 1 == 0)
        require(is_sane, f"{name} is {words}, not {given!r}")
        if abstract is Real:
            object.__setattr__(settings, name, _plain(given, kind))


@cache
def _kinds(settings: type) -> dict[str, tuple[type, bool]]:
    """A class's settings of Python's own types: which that is, and whether None will do, too."""
    found = {}
    for name, hint in get_type_hints(settings).items():
        kinds = members(hint)
        if len(kinds) == 1 and kinds[0] in _KINDS:
            found[name] = kinds[0], hint is not kinds[0]
    return found


def members(kind: Any) -> list[Any]:
    """The types of a union, less None and what they are of."""
    found = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return [get_origin(one) or one for one in found if one is not NoneType]


def check_range(settings: Any, least: float, most: float, *names: str) -> None:
    """Check that numbers, by their names, are neither too small nor too large; None is neither.

    Raises:
        ConfigError: one is.
    """
    bounds = f"at least {least}" if most == math.inf else f"{least} to {most}"
    for name in names:
        given = getattr(settings, name)
        is_within = given is None or least <= given <= most
        require(is_within, f"{name} must be {bounds}, not {given}")


def require(condition: bool, message: str) -> None:
    """Raise a `ConfigError` where a condition does not hold."""
    if not condition:
        raise ConfigError(message)


def _plain(number: Any, kind: type) -> int | float:
    try:
        return int(number) if kind is int else float(number)
    except OverflowError:  # a whole number larger than any float
        return math.inf if number > 0 else -math.inf


def _documented(kind: type) -> dict[str, str]:
    """What "Attributes:" of a class's docstring says of each, in one line."""
    _, _, listed = inspect.cleandoc(kind.__doc__ or "").partition("\nAttributes:\n")
    listed = re.split(r"\n(?=\S)", listed)[0]
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?= {4}\S)", "\n" + listed):
        names, colon, text = entry.partition(": ")
        if colon:
            found |= dict.fromkeys(names.strip().split(", "), " ".join(text.split()))
    return found
