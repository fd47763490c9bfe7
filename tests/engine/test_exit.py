"""Scripts that end: what they learned from use is on disk, and nothing takes the process down."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
from conftest import CHUNKS, tiny_model
from fresh import run_fresh

from cached_rag import ConfigError, Engine, StoreConfig
from cached_rag.library.learning import Activity, WriteBack

pytestmark = pytest.mark.slow

TEXTS = [f"{chunk} It is told in chapter {number}." for number in range(3) for chunk in CHUNKS]
SCRIPT = f"""
import sys
from cached_rag import Engine, StoreConfig
texts = {TEXTS!r}

def ask(path):
    store = StoreConfig(path=path)
    engine = Engine.load(sys.argv[1], store=store, dtype="float32", device="cpu")
    engine.register(texts)
    report = engine.generate("\\n\\n".join([*texts, "Why?"]), max_tokens=2, method="fast").report
    print(report.modules_hit, report.modules_missed)
    return engine
"""
ENDS = {
    "never closed": "engine = ask(sys.argv[2])",
    "collected": "ask(sys.argv[2])",
    "closed": "ask(sys.argv[2]).close()",
    "in a thread": """
import threading
thread = threading.Thread(target=ask, args=sys.argv[2:3])
thread.start()
thread.join()
""",
}


def run(model, *arguments, end):
    """A script's end state: exit code, last line of its output, all it said otherwise."""
    done = run_fresh(SCRIPT + end, model, *arguments, TQDM_DISABLE="1")
    return done.returncode, done.stdout.splitlines()[-1:], done.stderr


def kv_files(store):
    return list(Path(store).glob("blobs/*/*.safetensors"))


@pytest.mark.parametrize("how", ["never closed", "closed", "in a thread"])
def test_what_a_script_learned_is_there_for_the_next_one(how, model_folder, tmp_path):
    assert run(model_folder, tmp_path, end=ENDS[how]) == (0, [f"0 {len(TEXTS)}"], "")
    assert len(kv_files(tmp_path)) >= len(TEXTS)
    store = StoreConfig(path=str(tmp_path))
    with Engine.load(model_folder, store=store, dtype="float32", device="cpu") as later:
        report = later.generate("\n\n".join([*TEXTS, "Why?"]), max_tokens=2, method="fast").report
    assert (report.modules_hit, report.modules_missed) == (len(TEXTS), 0)


def test_a_script_that_finds_all_it_learned_ends_well(model_folder, tmp_path):
    for found in (0, len(TEXTS)):
        said = f"{found} {len(TEXTS) - found}"
        assert run(model_folder, tmp_path, end=ENDS["collected"]) == (0, [said], "")


def test_a_script_without_a_disk_ends_well(model_folder):
    assert run(model_folder, end="engine = ask(None)") == (0, [f"0 {len(TEXTS)}"], "")


def test_a_forked_child_leaves_its_parents_work_alone(model_folder, tmp_path):
    end = """
engine = ask(sys.argv[2])
import os
with engine.lock:  # held by nobody in the child, for ever
    child = os.fork()
    if not child:
        sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    code, _, said = run(model_folder, tmp_path, end=end)
    assert (code, said) == (0, "")
    assert len(kv_files(tmp_path)) >= len(TEXTS)


def test_a_forked_child_is_told_to_make_an_engine_of_its_own(model_folder, tmp_path):
    end = """
import os, signal
from cached_rag.errors import ClosedError
engine = Engine.shared(sys.argv[1], store=StoreConfig(path=sys.argv[2]), dtype="float32")
with engine.lock:  # as what encodes in the background holds it
    child = os.fork()
    if not child:
        signal.alarm(60)  # where it would wait for ever
        try:
            engine.generate("Why?")
        except ClosedError as error:
            print(error, file=sys.stderr)
        engine.close()
        own = Engine.shared(sys.argv[1], store=StoreConfig(path=sys.argv[2]), dtype="float32")
        os._exit(7 if own.generate("Why?", max_tokens=2).token_ids else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert engine.generate("Why?", max_tokens=2).token_ids
"""
    code, _, said = run(model_folder, tmp_path, end=end)
    assert code == 0
    assert "a forked process has to make its own" in said


def test_closing_finishes_what_waits(tmp_path):
    engine = Engine(tiny_model("llama"), StoreConfig(path=str(tmp_path)))
    engine.register(CHUNKS)
    engine.generate("\n\n".join([*CHUNKS, "Why?"]), max_tokens=2)
    engine.close()
    with Engine(tiny_model("llama"), StoreConfig(path=str(tmp_path))) as again:
        report = again.generate("\n\n".join([*CHUNKS, "Why?"]), max_tokens=2, method="fast").report
    assert (report.modules_hit, report.modules_missed) == (len(CHUNKS), 0)


def waiting(finish_seconds, works):
    """A queue whose tasks wait for a request, and the names of the tasks that were done."""
    activity, done = Activity(), []
    background = WriteBack(activity, finish_seconds=finish_seconds)
    activity.begin(background)
    for name, work in works.items():
        background.offer(name, lambda name=name, work=work: (work(), done.append(name)))
    return background, done


def test_what_the_bound_leaves_undone_is_counted(caplog):
    late = threading.Event()
    works = {"a": lambda: late.wait(0.2), "b": lambda: None, "c": lambda: None}
    background, done = waiting(0.1, works)
    with caplog.at_level(logging.WARNING):
        background.close()
    assert done == ["a"]  # what was begun is finished
    assert "2 chunk(s) were not encoded" in caplog.text
    assert "finish_seconds" in caplog.text
    background.offer("d", lambda: done.append("d"))
    background.drain()
    assert done == ["a"]  # nothing is taken any more


def test_nothing_is_finished_that_ends_with_the_process(caplog):
    background, done = waiting(60, {"a": lambda: None})
    background.offer("promotion", lambda: done.append("promotion"), lasts=False)
    background.close()
    assert done == ["a"]
    background, done = waiting(0, {"a": lambda: None})
    background.close()
    assert done == []
    assert not caplog.text


def test_an_interrupt_ends_the_finishing(caplog):
    def interrupted():
        raise KeyboardInterrupt

    background, done = waiting(60, {"a": lambda: None, "b": interrupted, "c": lambda: None})
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        background.close()
    assert done == ["a"]
    assert "1 chunk(s) were not encoded" in caplog.text
    background.close()
    assert done == ["a"]


def test_an_interrupt_at_the_end_of_a_script_ends_it_soon(model_folder, tmp_path):
    end = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
engine = ask(sys.argv[2])
engine._resources.shared.activity.begin(engine)  # so that all of it is left for the end
def slow():
    signal.raise_signal(signal.SIGINT)
for name in range(100):
    engine.write_back.offer(name, slow)
"""
    code, _, said = run(model_folder, tmp_path, end=end)
    assert code == 0
    assert "finish_seconds" in said
    assert "Traceback" not in said


def test_a_bound_is_no_negative_number():
    with pytest.raises(ConfigError, match="finish_seconds"):
        StoreConfig(finish_seconds=-1)


def test_an_idle_engine_closes_at_once():
    background = WriteBack(Activity(), finish_seconds=60)
    done = threading.Event()
    background.offer("a", done.set)
    done.wait(60)
    thread = next(t for t in threading.enumerate() if t.name == "write-back")
    background.close()
    assert not thread.is_alive()
