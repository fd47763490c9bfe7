"""A model's files are replaced by others of the same names, sizes and times, wherever they are."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from conftest import tiny_model, tiny_tokenizer
from faults import world
from faults.outcome import Outcome
from safetensors.torch import load_file, save_file
from tiny_gguf import write_gguf

from cached_rag import Engine, StoreConfig
from cached_rag.backends.resolve import cache_dir

Change = Callable[[Path, random.Random], None]


_WEIGHTS = "model.safetensors"
# Where an index may name them.
_PLACES = ("shards/a.safetensors", "../elsewhere/a.safetensors")
# Bytes that are zeroed in a file.
_ZEROED = 4096


def _weights(folder: Path, chance: random.Random) -> None:
    _negate(folder / _WEIGHTS, chance)


def _negate(path: Path, chance: random.Random) -> None:
    """One tensor's sign changes: the file keeps its size and its header."""
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
    """Try each of `CHANGES` so many times, and what else may become of a model's files."""
    sound = folder / "sound"
    tiny_model(world.MODEL).decoder.model.save_pretrained(sound)
    tiny_tokenizer().save_pretrained(sound)
    outcomes = []
    others = {
        "weights replaced where an index names them": _named_elsewhere,
        "weights written over while the model runs": _written_over,
        "weights that were made of a GGUF damaged": _damaged_copy,
    }
    for what, tried in others.items():
        outcome = Outcome(f"the model's {what}")
        for number in range(trials):
            place = folder / f"other{number}"
            shutil.copytree(sound, place / "model")
            try:
                outcome.add(*tried(place, chance))
            except Exception as error:
                outcome.add(0, 0, [f"{error!r:.300}"])
            shutil.rmtree(place)
        outcomes.append(outcome)
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
        _, wrong, found = _judged(before, _logits(model, store), _logits(model, None))
    except Exception as error:
        found.append(f"{error!r:.300}")
    shutil.rmtree(folder)
    return 0, wrong, found


Tried = tuple[int, int, list[str]]


def _named_elsewhere(folder: Path, chance: random.Random) -> Tried:
    """An index names weights in other folders, which change; or it comes to name other ones."""
    model, store = folder / "model", folder / "kv"
    place = chance.choice(_PLACES)
    (model / place).parent.mkdir()
    (model / _WEIGHTS).rename(model / place)
    _name(model, place)
    before = _logits(model, store)
    if chance.random() < 0.5:
        shutil.copy(model / place, model / "b.safetensors")
        _negate(model / "b.safetensors", chance)
        _name(model, "b.safetensors")
    else:
        _negate(model / place, chance)
    return _judged(before, _logits(model, store), _logits(model, None))


def _name(model: Path, place: str) -> None:
    names = {"metadata": {}, "weight_map": dict.fromkeys(load_file(model / place), place)}
    (model / f"{_WEIGHTS}.index.json").write_text(json.dumps(names))


def _written_over(folder: Path, chance: random.Random) -> Tried:
    """The running model goes on with its own weights, and what it keeps is not the new ones'."""
    model, store = folder / "model", folder / "kv"
    with _engine(model, store) as engine:
        before = _first_logits(engine)
        with (model / _WEIGHTS).open("r+b") as file:  # in place, as if the file had been mapped
            other = folder / "other.safetensors"
            shutil.copy(model / _WEIGHTS, other)
            _negate(other, chance)
            file.write(other.read_bytes())
        during = _first_logits(engine)
    wrong = int((during - before).abs().max() > 1e-4)
    lost, more, found = _judged(before, _logits(model, store), _logits(model, None))
    return lost, wrong + more, found


def _damaged_copy(folder: Path, chance: random.Random) -> Tried:
    """4 KiB of the folder that a GGUF was converted to, or all behind them, are gone."""
    with patch.dict(os.environ, CACHED_RAG_CACHE=str(folder / "cache")):
        file = write_gguf(folder / "tiny.gguf")
        before = _logits(file, None)
        (path,) = (cache_dir() / "models").rglob("*.safetensors")
        at = chance.randrange(path.stat().st_size - _ZEROED)
        with path.open("r+b") as opened:
            opened.seek(at)
            opened.write(bytes(_ZEROED))
            if chance.random() < 0.3:
                opened.truncate()
        return 0, int((_logits(file, None) - before).abs().max() > 1e-4), []


def _judged(before: torch.Tensor, after: torch.Tensor, clean: torch.Tensor) -> Tried:
    """What came of a change: the logits before, after it, and after it without a store."""
    changed = (clean - before).abs().max() >= 1e-4
    found = [] if changed else ["the change changed nothing, so the trial tells nothing"]
    return 0, int((after - clean).abs().max() > 1e-4), found


def _engine(model: Path, store: Path | None) -> Engine:
    path = None if store is None else str(store)
    settings = StoreConfig(path=path, sequence_bytes=0, write_back=False)
    return Engine.load(str(model), store=settings, dtype="float32")


def _first_logits(engine: Engine) -> torch.Tensor:
    engine.encode(world.TEXTS[:6], context=None)
    request = engine.prefill(world.PROMPT, method="reuse")
    logits = request.logits[-1].clone()
    request.release()
    return logits


def _logits(model: Path, store: Path | None) -> torch.Tensor:
    """Those of a prompt's first token, its texts reused from a store."""
    with _engine(model, store) as engine:
        return _first_logits(engine)
