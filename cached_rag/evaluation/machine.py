"""What this machine and a model can do, and a self-test of partial prefill against the model."""

import os
import platform
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from cached_rag.backends.base import Backend, RepairInput
from cached_rag.backends.machine import profile_of
from cached_rag.backends.transformers.few_bits import FewBitLinear
from cached_rag.backends.transformers.model import LanguageModel
from cached_rag.engine.engine import Engine
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.layers import stacks_of
from cached_rag.methods import CacheBlend, Layout

_TOKENS = 64
# Lengths of prompts whose pace is told.
_LENGTHS = (512, 8192)
# Allowed are this many times the error of the model's own prefill in two pieces.
_MARGIN = 4
_SPLITS = (1, _TOKENS // 2, _TOKENS - 1)


def machine(model: Backend | None = None) -> dict[str, object]:
    """Processor, threads, accelerator, versions; and the model's dtype and device."""
    facts: dict[str, object] = {
        "commit": _commit(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if model is not None:
        shapes = model.shapes
        facts |= {"model": model.name, "dtype": str(shapes.dtype), "device": str(shapes.device)}
    return facts


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of this checkout, with a + if files have changed since; None if it is none."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    with suppress(OSError):
        done = subprocess.run([*git, "--exclude=*"], capture_output=True, text=True, check=False)
        return done.stdout.strip() or None
    return None


@dataclass(frozen=True)
class SelfTest:
    """A test's largest error of a logit and the most allowed, as shares of the largest logit."""

    name: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether rounding explains the difference."""
        return self.error <= self.allowed


def examine(engine: Engine) -> dict[str, object]:
    """Facts about the machine, the model and the store."""
    model = engine.model
    disk = engine.library.shelf.disk
    return machine(model) | {
        "context_length": model.context_length,
        "position_rule": str(model.rule),
        "attention": "scattered rows" if model.can_watch else "the model's own",
        **model.details,
        "kv_bytes_per_token": model.shapes.bytes_per_token,
        "store": str(disk.path) if disk else "memory only",
        "store_bytes": engine.library.shelf.store_bytes(),
        "texts": len(engine.library.table),
        **_rates(model),
    }


def _rates(model: Backend) -> dict[str, object]:
    """How many tokens of a prompt are prefilled in a second."""
    profile = profile_of(model, fresh=True)
    lengths = [min(length, model.context_length) for length in _LENGTHS]
    return {f"prefill_tokens_per_s_{n}": round(n / profile.compute_s(n), 1) for n in lengths}


def _rounding(model: Backend) -> float:
    """The coarsest rounding in a pass: that of its dtype, or of few-bit kernels' rows."""
    dtypes = {model.shapes.dtype}
    if isinstance(model, LanguageModel):
        layers = model.decoder.network.modules()
        dtypes |= {one.scales.dtype for one in layers if isinstance(one, FewBitLinear)}
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def self_test(engine: Engine) -> list[SelfTest]:
    """Partial prefill against the model's own forward pass, on random tokens, in its dtype.

    The allowed error is measured, too: it is a few times the model's own error when it prefills in
    two pieces through its own cache. Both errors grow with depth, width and outlier channels.
    """
    model = engine.model
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.vocab_size, (1, _TOKENS), generator=generator)
    plain = model.forward(ids).float()

    def error(logits: torch.Tensor) -> float:
        return float((logits.float() - plain).abs().max() / plain.abs().max())

    own = max(error(model.forward(ids, split)) for split in _SPLITS)
    allowed = _MARGIN * max(own, _rounding(model))
    buffer = KVBuffer.like(model.shapes, _TOKENS)
    tests = [SelfTest("full prefill", error(model.prefill(buffer, ids).logits), allowed)]
    if model.keeps_states:
        half = _TOKENS // 2
        model.prefill(buffer, ids[:, :half], num_logits=0)
        logits = model.prefill(buffer, ids, torch.arange(half, _TOKENS)).logits
        return [*tests, SelfTest("going on from states", error(logits), allowed)]
    rows = torch.tensor([*range(3, _TOKENS - 1, 5), _TOKENS - 1])
    logits = model.prefill(buffer, ids, rows).logits
    tests.append(SelfTest("scattered rows over true KV", error(logits), allowed))
    for stack in (*stacks_of(buffer.keys), *stacks_of(buffer.values)):
        stack.fill_(1.0)
    live = torch.zeros(_TOKENS, dtype=torch.bool)
    live[-1] = True
    layout = Layout(live, torch.zeros_like(live), ((0, _TOKENS - 1),), model.shapes.num_layers)
    logits = model.repair(RepairInput(buffer, ids, layout, CacheBlend(1.0))).logits
    tests.append(SelfTest("everything recomputed over garbage", error(logits), allowed))
    return tests
