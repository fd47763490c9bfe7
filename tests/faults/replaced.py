"""A model's files are replaced by others of the same names, sizes and times."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from conftest import tiny_model, tiny_tokenizer
from faults import world
from faults.outcome import Outcome
from safetensors.torch import load_file, save_file

from cached_rag import Engine, StoreConfig

Change = Callable[[Path, random.Random], None]


def _weights(folder: Path, chance: random.Random) -> None:
    """One tensor's sign changes: the file keeps its size and its header."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = chance.choice([name for name in sorted(tensors) if ".layers." in name])
    tensors[name] = -tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})


def _config(folder: Path, chance: random.Random) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rms_norm_eps"] = chance.choice([0.1, 0.5])
    path.write_text(json.dumps(config))


def _tokenizer(folder: Path, chance: random.Random) -> None:
    """Two tokens of the prompt change places, so texts have other ids."""
    path = folder / "tokenizer.json"
    known = json.loads(path.read_text())
    vocabulary = known["model"]["vocab"]
    used = sorted(set(tiny_tokenizer().tokenize(world.PROMPT)))
    one, other = chance.sample(used, 2)
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(known))


CHANGES: dict[str, Change] = {"weights": _weights, "config": _config, "tokenizer": _tokenizer}


def campaign(trials: int, folder: Path, chance: random.Random) -> list[Outcome]:
    """Try each of `CHANGES` so many times."""
    sound = folder / "sound"
    tiny_model(world.MODEL).decoder.model.save_pretrained(sound)
    tiny_tokenizer().save_pretrained(sound)
    outcomes = []
    for what, change in CHANGES.items():
        outcome = Outcome(f"the model's {what} replaced under the same name")
        for number in range(trials):
            outcome.add(*_tried(change, folder / f"{what}{number}", sound, chance))
        outcomes.append(outcome)
    return outcomes


def _tried(
    change: Change, folder: Path, sound: Path, chance: random.Random
) -> tuple[int, int, list[str]]:
    model, store = folder / "model", folder / "kv"
    shutil.copytree(sound, model)
    found, wrong = [], 0
    try:
        before = _logits(model, store)
        times = {path: path.stat() for path in model.iterdir()}
        change(model, chance)
        for path, stat in times.items():
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        after, clean = _logits(model, store), _logits(model, None)
        wrong = int((after - clean).abs().max() > 1e-4)
        if (after - before).abs().max() < 1e-4:
            found.append("the change changed nothing, so the trial tells nothing")
    except Exception as error:
        found.append(f"{error!r:.300}")
    shutil.rmtree(folder)
    return 0, wrong, found


def _logits(model: Path, store: Path | None) -> torch.Tensor:
    """Those of a prompt's first token, its texts reused from a store."""
    path = None if store is None else str(store)
    settings = StoreConfig(path=path, sequence_bytes=0, write_back=False)
    with Engine.load(str(model), store=settings, dtype="float32") as engine:
        engine.encode(world.TEXTS[:6], context=None)
        request = engine.prefill(world.PROMPT, method="reuse")
        logits = request.logits[-1].clone()
        request.release()
    return logits
