"""Carries what a GGUF says about rotation into a configuration of transformers. Reads no weights.

transformers' own reader drops all of it but the base: scaled frequencies, and heads of which only
a part rotates. A model that rotates in another way than it was trained to gives wrong numbers and
no error, so that what has no equal in a configuration is refused.
"""

from typing import Any, NoReturn

import gguf
import numpy as np
import torch
from transformers import modeling_gguf_pytorch_utils as loader
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cached_rag.backends.untrusted import BoundedReader
from cached_rag.errors import ModelError

# Llama 3.1 and after differ only in the factor. A GGUF keeps the frequencies these numbers give.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Kinds whose code in transformers can rotate a part of each head.
_PARTIAL = {"phi3", "stablelm", "nemotron", "minimax-m2"}
# Fields that change the numbers, have no equal in a configuration, and these values if they do not.
_NEUTRAL = {
    "alpha": 0.0,
    "attn_factor": 1.0,
    "yarn_log_multiplier": 0.0,
    "yarn_attn_factor": 1.0,
}
ROTATIONS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Frequencies divided by more than this do not rotate: how a GGUF has heads that rotate in part.
_NEVER = 1e20


def set_rotation(config: Any, reader: BoundedReader) -> None:
    """Set a configuration's rotation to that of the file.

    Args:
        config: what transformers makes of the file; changed in place.
        reader: the file, all its fields there.

    Raises:
        ModelError: transformers has nothing that rotates as the file says.
    """
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return
    given = _Given(reader)
    if "full_attention" in rope:
        _set_by_layer(rope, given)
        return
    wanted = dict(rope) | {"rope_theta": given.number("freq_base", rope["rope_theta"])}
    wanted |= _part(config, wanted, given)
    config.rope_parameters = wanted  # the frequencies below are computed by it
    config.rope_parameters = wanted | _scaling(config, given)
    if config.rope_parameters["rope_type"] == "longrope":
        # phi3 reads it at the top, too
        config.original_max_position_embeddings = given.original_length(config)


def refuse_scaling(reader: BoundedReader) -> None:
    """For kinds whose configuration transformers makes complete but for scaled frequencies.

    Raises:
        ModelError: the file scales its frequencies.
    """
    given = _Given(reader)
    given.refuse_unknown()
    if given.tensors:
        given.refuse(" and ".join(sorted(given.tensors)))
    if given.scaling != "none":
        given.refuse(f"rope.scaling.type {given.scaling!r}")


class _Given:
    """What a file says about rotation.

    Attributes:
        tensors: frequency factors by their names, in fp32.
        factor: how much longer contexts became by scaling; 1 if they did not.
        scaling: "none", "linear", "yarn" or "longrope"; or a type that is not known here.
    """

    def __init__(self, reader: BoundedReader) -> None:
        self.kind, self._reader = reader.architecture, reader
        self.tensors = {
            tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            for tensor in reader.tensors
            if tensor.name in ROTATIONS
        }
        # Old files have "scale_linear". As llama.cpp reads them, no type means linear, 0 means 1.
        self.factor = self.number("scaling.factor", self.number("scale_linear", 1.0)) or 1.0
        found = loader.read_field(reader, f"{self.kind}.rope.scaling.type")
        self.scaling = str(found[0]) if found else "linear"
        if self.scaling == "linear" and self.factor == 1.0:
            self.scaling = "none"

    def number(self, name: str, default: float) -> float:
        return self._reader.number(f"rope.{name}", default)

    def original_length(self, config: Any) -> int:
        default = config.max_position_embeddings
        return int(self.number("scaling.original_context_length", default))

    def refuse_unknown(self, *known: str) -> None:
        """Refuse a field of `_NEUTRAL` that is not `known` and changes the numbers."""
        for name, neutral in _NEUTRAL.items():
            if name not in known and (value := self.number(f"scaling.{name}", neutral)) != neutral:
                self.refuse(f"rope.scaling.{name} {value:g}")
        # llama.cpp takes a negative number for the type's own.
        own = float(self.scaling == "yarn")
        if (mixed := self.number("scaling.yarn_ext_factor", own)) not in (own, -1.0):
            self.refuse(f"rope.scaling.yarn_ext_factor {mixed:g}")

    def refuse(self, what: str) -> NoReturn:
        raise unlike(self.kind, f"{what}, which no rotation in transformers equals")


def unlike(kind: str, what: str) -> ModelError:
    """Says that transformers would compute something else than a file says."""
    return ModelError(
        f"this GGUF file ({kind}) has {what}: its numbers would be wrong. Load it with "
        'backend="llama.cpp", or the model it was made from'
    )


def _part(config: Any, rope: dict[str, Any], given: _Given) -> dict[str, float]:
    """How much of each head rotates; empty if the configuration says so already."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = int(given.number("dimension_count", 0))
    if rotated in (0, int(width * (rope.get("partial_rotary_factor") or 1.0))):
        return {}
    if given.kind not in _PARTIAL or rotated > width:
        given.refuse(f"rope.dimension_count {rotated} and heads of {width}")
    return {"partial_rotary_factor": rotated / width}


def _scaling(config: Any, given: _Given) -> dict[str, Any]:
    """What `rope_parameters` need for the file's scaling."""
    if {"rope_factors_long.weight", "rope_factors_short.weight"} & given.tensors.keys():
        return _longrope(config, given)
    given.refuse_unknown()
    if "rope_freqs.weight" in given.tensors:
        return _llama3(config, given)
    if given.scaling == "none":
        return {"rope_type": "default"}
    if given.scaling == "linear":
        return {"rope_type": "linear", "factor": given.factor}
    if given.scaling != "yarn":
        given.refuse(f"rope.scaling.type {given.scaling!r}")
    return {
        "rope_type": "yarn",
        "factor": given.factor,
        "original_max_position_embeddings": given.original_length(config),
        "beta_fast": given.number("scaling.yarn_beta_fast", 32.0),
        "beta_slow": given.number("scaling.yarn_beta_slow", 1.0),
    }


def _longrope(config: Any, given: _Given) -> dict[str, Any]:
    given.refuse_unknown("attn_factor")
    if given.kind != "phi3" or len(given.tensors) != 2 or given.factor != 1.0:
        given.refuse(" and ".join(sorted(given.tensors)))
    return {
        "rope_type": "longrope",
        "long_factor": given.tensors["rope_factors_long.weight"].tolist(),
        "short_factor": given.tensors["rope_factors_short.weight"].tolist(),
        "attention_factor": given.number("scaling.attn_factor", 1.0),
        "original_max_position_embeddings": given.original_length(config),
    }


def _llama3(config: Any, given: _Given) -> dict[str, Any]:
    """Llama 3's scaling, if it gives the file's frequencies; a file has no numbers but those."""
    factors = torch.from_numpy(given.tensors["rope_freqs.weight"])
    if given.scaling != "none":
        given.refuse(f"rope_freqs.weight and rope.scaling.type {given.scaling!r}")
    if bool((factors == 1.0).all()):
        return {"rope_type": "default"}
    wanted = {"rope_type": "llama3", "factor": float(factors.max())} | _LLAMA3
    plain = config.rope_parameters
    config.rope_parameters = dict(plain) | wanted
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    config.rope_parameters = plain
    powers = torch.arange(len(scaled)) / len(scaled)
    own = plain["rope_theta"] ** -powers
    if len(factors) != len(own) or not torch.allclose(own / factors, scaled, rtol=1e-3, atol=0.0):
        given.refuse("rope_freqs.weight, which is not Llama 3's scaling")
    return wanted


def _set_by_layer(rope: dict[str, Any], given: _Given) -> None:
    """For kinds whose sliding layers rotate otherwise: only the other layers are scaled."""
    given.refuse_unknown()
    full, sliding = rope["full_attention"], rope["sliding_attention"]
    full["rope_theta"] = given.number("freq_base", full["rope_theta"])
    sliding["rope_theta"] = given.number("freq_base_swa", sliding["rope_theta"])
    if given.tensors:
        _check_proportional(full, given)
    if given.scaling == "linear" and given.kind == "gemma3":
        full |= {"rope_type": "linear", "factor": given.factor}
    elif given.scaling != "none":
        given.refuse(f"rope.scaling.type {given.scaling!r}")


def _check_proportional(full: dict[str, Any], given: _Given) -> None:
    """Refuse frequency factors but for those that keep the end of each head, as full layers do."""
    factors = given.tensors.get("rope_freqs.weight")
    if full["rope_type"] != "proportional" or factors is None or len(given.tensors) > 1:
        given.refuse(" and ".join(sorted(given.tensors)))
    rotated = int(len(factors) * full.get("partial_rotary_factor", 1.0))
    if not ((factors[:rotated] == 1.0).all() and (factors[rotated:] > _NEVER).all()):
        given.refuse("rope_freqs.weight that scales")
