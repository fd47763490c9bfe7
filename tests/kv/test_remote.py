"""The remote tier against real servers: killed, slow, damaged, foreign; never a wrong answer."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from traceback import format_exception
from types import SimpleNamespace

import pytest
import redis
import torch
from safetensors.torch import save
from servers import Proxy, Server, free_port, redis_server, s3_server

from cached_rag import StoreConfig
from cached_rag.errors import ConfigError, CorruptBlobError, StoreError
from cached_rag.kv import transports, wire
from cached_rag.kv.blob import contents
from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.codecs import codec_by_name
from cached_rag.kv.layers import KVShapes, LayerShape
from cached_rag.kv.remote import RemoteTier, open_remote
from cached_rag.kv.tiers import Outbox
from cached_rag.kv.transports import Calls, label_of, open_transport
from cached_rag.kv.wire import Sizes, Wire

pytestmark = pytest.mark.slow


def module(seed: int, dtype=torch.float32) -> ModuleKV:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 3, 2, 5, 4, generator=generator).to(dtype)
    return ModuleKV(tuple(range(seed, seed + 5)), 7, keys, values)


def key(seed: int) -> str:
    return f"{seed:040x}"


def same(a: ModuleKV, b: ModuleKV) -> bool:
    alike = a.token_ids == b.token_ids and a.start == b.start
    return alike and torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


@pytest.fixture(scope="module")
def redis_at(tmp_path_factory):
    server = redis_server(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def s3_at(tmp_path_factory):
    server = s3_server(tmp_path_factory.mktemp("weed"))
    environment = pytest.MonkeyPatch()
    environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    environment.setenv("AWS_ACCESS_KEY_ID", "user")
    environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    environment.setenv("AWS_REGION", "us-east-1")
    _make_bucket(server)
    yield server
    environment.undo()
    server.kill()


def _make_bucket(server: Server) -> None:
    from obstore.store import S3Store

    root = S3Store(
        "bucket", virtual_hosted_style_request=False, client_options={"allow_http": True}
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # the first object makes the bucket
        with suppress(Exception):
            root.put("there", b"1")
            return
        time.sleep(0.2)
    raise RuntimeError(server.log.read_text()[-2000:])


@pytest.fixture(params=["redis", "s3", "file"])
def url(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/shared"
    server = request.getfixturevalue(f"{request.param}_at")
    return f"redis://127.0.0.1:{server.port}/0" if request.param == "redis" else "s3://bucket/kv"


@pytest.fixture
def tiers():
    made: list[RemoteTier] = []

    def make(url: str, codec="raw", secret=None, timeout_s=10.0) -> RemoteTier:
        how = StoreConfig(remote=url, codec=codec, signing_key=secret, remote_timeout=timeout_s)
        made.append(open_remote(how))
        return made[-1]

    yield make
    for tier in made:
        tier.close(0)


def fetch(tier: RemoteTier, *modules: ModuleKV, namespace="") -> dict[str, ModuleKV]:
    wanted = {key(kv.token_ids[0]): kv.token_ids for kv in modules}
    return tier.fetch(namespace, wanted)[0]


def offer(tier: RemoteTier, *modules: ModuleKV, namespace="") -> None:
    for kv in modules:
        tier.offer(namespace, key(kv.token_ids[0]), kv)
    assert tier.drain() == 0


def test_a_value_of_no_bytes_takes_no_other_with_it(url, tiers):
    here, there, (a, b) = tiers(url), tiers(url), [module(n) for n in (1, 2)]
    offer(here, a, b)
    here._transport.put(here._name("", key(1)), b"")
    assert fetch(there, a, b).keys() == {key(2)}
    assert there.pause_s == 0


def test_a_key_of_another_type_takes_no_other_with_it(redis_at, tiers):
    url = f"redis://127.0.0.1:{redis_at.port}/0"
    here, there, (a, b) = tiers(url), tiers(url), [module(n) for n in (1, 2)]
    offer(here, a, b)
    client = redis.Redis(port=redis_at.port)
    (name,) = client.keys(f"*{here._name('', key(1))}")
    client.delete(name)
    client.lpush(name, "of somebody else")
    assert fetch(there, a, b).keys() == {key(2)}
    assert there.pause_s == 0
    client.delete(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_one_machine_sends_another_gets(url, tiers, dtype):
    here, there, (a, b, c) = tiers(url), tiers(url), [module(n, dtype) for n in (1, 2, 3)]
    offer(here, a, b)
    found = fetch(there, a, b, c)
    assert found.keys() == {key(1), key(2)}
    assert same(found[key(1)], a)
    assert same(found[key(2)], b)
    assert there.holds("", [key(1), key(3)]) == {key(1)}
    here.delete("", [key(1), key(3)])
    assert not fetch(tiers(url), a)
    here.delete("", [key(2)])


def test_codecs_and_tenants_do_not_mix(url, tiers):
    here, kv = tiers(url), module(4)
    offer(here, kv, namespace="a/../b %")
    assert fetch(tiers(url), kv, namespace="a/../b %")
    assert not fetch(tiers(url), kv)
    assert not fetch(tiers(url), kv, namespace="a")
    assert not fetch(tiers(url, codec="int8"), kv, namespace="a/../b %")


def test_a_long_name_of_a_tenant_holds_up_nobody(url, tiers):
    here, kv = tiers(url), module(6)
    offer(here, kv, namespace="«отдел снабжения» " * 5)
    assert fetch(tiers(url), kv, namespace="«отдел снабжения» " * 5)
    assert here.pause_s == 0


def test_int8_comes_back_as_the_codec_rounds_it(url, tiers):
    kv = module(5)
    offer(tiers(url, codec="int8"), kv)
    (found,) = fetch(tiers(url, codec="int8"), kv).values()
    assert (found.keys - kv.keys).abs().max() <= kv.keys.abs().max() / 254 + 1e-6


def test_heads_are_merged(url, tiers):
    here, there = tiers(url), tiers(url)
    here.add_heads("t", "model", [((1, 2), "primer")])
    there.add_heads("t", "model", [((), "")])
    assert here.heads("t", "model") == [((1, 2), "primer"), ((), "")]
    assert here.heads("", "model") == []


def test_of_many_heads_the_latest_are_known(url, tiers):
    days = [((1, 2, 1000 - day), "primer") for day in range(wire._MOST_HEADS + 6)]
    for day in days:
        tiers(url).add_heads("days", "model", [day])
    assert tiers(url).heads("days", "model") == days[6:]


def test_a_prompt_costs_one_round_trip(redis_at, tiers):
    url, modules = f"redis://127.0.0.1:{redis_at.port}/1", [module(n) for n in range(10, 18)]
    offer(tiers(url), *modules)
    proxy = Proxy(redis_at.port)
    there = tiers(f"redis://127.0.0.1:{proxy.port}/1")
    assert len(fetch(there, modules[0])) == 1  # it is connected now
    before = proxy.questions
    assert len(fetch(there, *modules[1:])) == 7
    assert proxy.questions == before + 1
    assert not fetch(there, module(19))
    assert not fetch(there, module(19))  # it is known for a while that it is not there
    assert proxy.questions == before + 2
    proxy.close()


@pytest.mark.parametrize("secret", [None, "0123456789abcdef"])
def test_no_damaged_value_is_used(redis_at, tiers, secret):
    url, kv = f"redis://127.0.0.1:{redis_at.port}/2", module(20)
    offer(tiers(url, secret=secret), kv)
    client = redis.Redis(port=redis_at.port, db=2)
    (name,) = client.keys("*")
    good = client.get(name)
    spots = [*range(0, len(good), 37), len(good) - 1]
    bad = [good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :] for at in spots]
    bad += [good[:-1], good[: len(good) // 2], good + b"x", b"cachedrag1", b"\0" * 4096]
    for data in bad:
        client.set(name, data)
        found, problems = tiers(url, secret=secret).fetch("", {key(20): kv.token_ids})
        assert not found
        assert "damaged or foreign" in problems[0]
    client.set(name, good)
    assert fetch(tiers(url, secret=secret), kv)
    client.close()


def test_a_value_under_another_name_is_not_used(redis_at, tiers):
    url, a, b = f"redis://127.0.0.1:{redis_at.port}/3", module(30), module(31)
    offer(tiers(url), a, b)
    client = redis.Redis(port=redis_at.port, db=3)
    first, second = client.keys("*")
    one, other = client.mget(first, second)
    client.mset({first: other, second: one})
    assert not fetch(tiers(url), a, b)
    client.close()


def test_only_what_is_signed_with_the_key_is_used_and_the_rest_is_left_there(url, tiers):
    kv, mine = module(40), "k" * 32
    offer(tiers(url), kv)
    there = tiers(url, secret=mine)
    there._transport.put(there._name("", key(41)), b"")
    assert there.holds("", [key(40), key(41), key(42)]) == set()
    there._useless.clear()
    assert tiers(url).holds("", [key(40)]) == {key(40)}
    assert not fetch(there, kv)
    assert there.holds("", [key(40)]) == set()  # so that it is sent again
    assert fetch(tiers(url), kv)
    offer(there, kv)
    assert fetch(tiers(url, secret=mine), kv)
    assert fetch(there, kv)
    assert not fetch(tiers(url, secret="other" * 4), kv)
    assert not fetch(tiers(url), kv)


def test_it_fails_at_once_while_the_server_is_gone_and_works_when_it_is_back(
    tmp_path, tiers, monkeypatch
):
    monkeypatch.setattr(transports, "_FIRST_S", 0.2)
    server, kv = redis_server(tmp_path), module(50)
    tier = tiers(f"redis://127.0.0.1:{server.port}/0", timeout_s=2.0)
    offer(tier, kv)
    server.kill()
    with pytest.raises(StoreError, match="cannot be used now"):
        fetch(tier, kv)
    with pytest.raises(StoreError, match="it failed lately"):
        fetch(tier, kv)
    tier.offer("", key(51), module(51))  # goes on trying for a while
    server.start()
    assert tier.drain() == 0
    time.sleep(tier.pause_s)  # reading has a pause of its own, which may be longer than sending's
    assert len(fetch(tier, kv, module(51))) == 2
    server.kill()


def test_what_cannot_be_sent_is_counted(tmp_path, tiers, monkeypatch):
    monkeypatch.setattr(transports, "_FIRST_S", 8.0)
    server = redis_server(tmp_path)
    tier = tiers(f"redis://127.0.0.1:{server.port}/0", timeout_s=1.0)
    server.kill()
    for n in range(5):
        tier.offer("", key(n), module(n))
    assert tier.drain() == 5
    assert tier.drain() == 0


def test_a_slow_server_is_waited_for_no_longer_than_allowed(redis_at, tiers):
    proxy, kv = Proxy(redis_at.port), module(60)
    offer(tiers(f"redis://127.0.0.1:{redis_at.port}/4"), kv)
    tier = tiers(f"redis://127.0.0.1:{proxy.port}/4", timeout_s=0.5)
    assert fetch(tier, kv)
    proxy.delay_s = 30.0
    began = time.monotonic()
    with pytest.raises(StoreError):
        fetch(tier, kv)
    assert time.monotonic() - began < 5
    proxy.close()


def test_a_silent_server_is_waited_for_once_however_much_is_to_be_sent(
    redis_at, tiers, monkeypatch
):
    monkeypatch.setattr(transports, "SENDING_S", 2.0)
    monkeypatch.setattr(transports, "_FIRST_S", 0.1)
    monkeypatch.setattr("cached_rag.kv.remote._PATIENCE_S", 0.5)
    proxy = Proxy(redis_at.port)
    proxy.delay_s = 60.0
    tier = tiers(f"redis://127.0.0.1:{proxy.port}/4", timeout_s=0.5)
    began = time.monotonic()
    for n in range(8):
        tier.offer("", key(n), module(n))
    assert tier.drain() == 8
    assert time.monotonic() - began < 6
    proxy.close()


def test_the_way_there_is_measured(redis_at, tiers):
    proxy, kv = Proxy(redis_at.port), module(61)
    tier = tiers(f"redis://127.0.0.1:{proxy.port}/5")
    assert tier.link.load_s(5) is None
    proxy.delay_s = 0.3
    offer(tier, kv)
    assert fetch(tier, kv)
    assert tier.link.load_s(5) > 0.2
    proxy.close()


def test_what_waits_to_be_sent_is_bounded():
    kv, sent = module(70), []
    uploads = Outbox(lambda name, *_: sent.append(name) or time.sleep(0.2) or True, 2 * kv.nbytes)
    for name in "abcde":
        uploads.add(name, kv)
    assert len(sent) <= 2
    assert uploads.drain() == 3
    assert sorted(sent) == ["a", "b"]


def test_what_cannot_be_packed_counts_as_not_sent():
    uploads = Outbox(lambda *_: 1 / 0, 1 << 20)
    uploads.add("a", module(1))
    assert uploads.drain(10) == 1


def test_what_is_deleted_is_not_sent_afterwards(redis_at, tiers):
    tier = tiers(f"redis://127.0.0.1:{redis_at.port}/6")
    for n in range(80, 90):
        tier.offer("", key(n), module(n))
    tier.delete("", [key(n) for n in range(80, 90)])
    assert tier.drain() == 0
    assert tier.holds("", [key(n) for n in range(80, 90)]) == set()


def _unknown() -> bool:
    raise StoreError("the catalog is locked")


@pytest.mark.parametrize("later", [lambda: False, _unknown])
def test_what_is_deleted_elsewhere_while_it_is_sent_is_taken_back(url, tiers, later):
    tier, kv, asked = tiers(url), module(92), []

    def wanted() -> bool:
        asked.append(len(fetch(tiers(url), kv)))
        return later() if len(asked) > 1 else True

    tier.offer("", key(92), kv, wanted)
    tier.drain()
    assert asked == [0, 1]  # it was there
    assert not fetch(tiers(url), kv)


def test_what_is_deleted_elsewhere_before_it_is_sent_is_not(url, tiers):
    tier, kv = tiers(url), module(93)
    tier._transport.put = lambda *_: pytest.fail("sent")
    tier.offer("", key(93), kv, lambda: False)
    assert tier.drain() == 0


def test_after_a_failure_one_asks_at_a_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(transports.time, "monotonic", lambda: now[0])
    calls = Calls(SimpleNamespace(label="redis://x"), 30)

    def allows():
        with suppress(StoreError):
            calls._check()
            return True
        return False

    assert allows()
    calls._failed(began=99.0)
    calls._failed(began=99.5)  # the same failure, seen by another
    assert not allows()
    now[0] += 1.0
    assert allows()
    assert not allows()
    calls._failed(began=now[0])
    now[0] += 1.5
    assert not allows()
    now[0] += 0.5
    assert allows()
    assert not allows()
    now[0] += 1.0
    assert calls.ask(lambda: "fine") == "fine"
    assert allows()
    calls.close()


def test_what_could_not_be_sent_is_held_by_nobody():
    calls, others = Calls(SimpleNamespace(label="redis://x"), 30), threading.enumerate()

    def fail(data):
        raise OSError("refused")

    data = torch.zeros(1)
    held = weakref.ref(data)
    gc.disable()  # which would find it, later
    try:
        with pytest.raises(StoreError, match="refused"):
            calls.do(partial(fail, data))
        for thread in set(threading.enumerate()) - set(others):
            thread.join()
        del data
        assert held() is None
    finally:
        gc.enable()


def test_addresses():
    with pytest.raises(ConfigError, match="no address"):
        open_transport("ftp://host/x", 1.0)
    with pytest.raises(ConfigError, match="Redis"):
        open_transport("redis://host:port/x", 1.0)
    assert label_of("redis://user:secret@host:1/0?x=y") == "redis://host:1/0"
    assert label_of("redis://user:sec/r@et@host:1/0") == "redis://host:1/0"
    assert "secret" not in label_of("redis://host/0?password=x@secret")
    for url in ("redis:/user:secret@host", "redis//user:secret@host", "user:secret@host:1"):
        with pytest.raises(ConfigError, match=r"(redis|user)'? is no address") as error:
            open_transport(url, 1.0)
        assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:secret/second@host",
        "redis://:[secret@host",
        "redis://:secret\u2100@host",
        "s3://user:secret/second@bucket/x",
        "abfs://user:secret@x",
        "s3://user:secret@?",
    ],
)
def test_addresses_are_refused_without_their_passwords(url):
    with pytest.raises(ConfigError, match="percent-encode") as caught:
        open_transport(url, 1.0)
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__  # a traceback shows nothing of urllib's error


def test_what_fails_later_shows_no_password_either(tiers):
    tier = tiers(f"http://user:secret@127.0.0.1:{free_port()}/x?sig=secret")
    with pytest.raises(StoreError, match=r"cannot be used now: .*GET http://127.0.0.1") as caught:
        fetch(tier, module(1))
    assert "secret" not in "".join(format_exception(caught.value))


WIRE = Wire(codec_by_name("raw"))


def sizes(context_length=100) -> Sizes:
    kv = module(0)
    shapes = KVShapes((LayerShape(2, 4, 4),) * 3, kv.keys.dtype, torch.device("cpu"))
    return Sizes(shapes, context_length, vocab_size=50)


def packed(kv: ModuleKV, **header: str) -> bytes:
    """A value whose header lies, but whose checksums are right."""
    tensors, honest = contents(key(1), kv, codec_by_name("raw"))
    return WIRE._sealed("name", save(tensors, honest | header))


def taken(data: bytes, limits=None) -> ModuleKV:
    reader = Wire(codec_by_name("raw"), sizes=limits or sizes())
    return reader.unpack("name", data, key(1), module(1).token_ids)


def test_values_that_lie_about_themselves_are_not_used():
    good = module(1)
    assert same(taken(packed(good)), good)
    lies = [
        packed(good, start="1" + "0" * 30),
        packed(good, start="99"),  # ends beyond the context
        packed(good, start="-1"),
        *(packed(good, dtype=name) for name in ("cuda", "nn", "Tensor", "nothing")),
        packed(good, layers="0"),
        packed(replace(good, keys=good.keys.double(), values=good.values.double())),
        packed(replace(good, keys=good.keys[:2], values=good.values[:2])),
        packed(good) + b"0" * (1 << 17),  # far more than five tokens can take
        b"",
    ]
    for data in lies:
        with pytest.raises(CorruptBlobError):
            taken(data)


def test_headers_that_would_take_memory_or_time_are_refused():
    ids = {"dtype": "I32", "shape": [5], "data_offsets": [0, 20]}
    many = {f"t{n}": {"dtype": "U8", "shape": [9000], "data_offsets": [0, 9000]} for n in range(14)}
    headers = [
        many | {"token_ids": ids},  # all of them at the same place
        {f"t{n}": ids for n in range(40)},
        {"token_ids": ids, "keys": ids | {"shape": [2**70, 0]}},
        {"token_ids": ids, "keys": ids | {"shape": [10**400] * 8}},
        {"token_ids": ids, "keys": ids | {"shape": [1] * 100}},
        {"token_ids": ids | {"shape": [[5]]}},
        [],
    ]
    for header in headers:
        text = json.dumps(header).encode()
        payload = len(text).to_bytes(8, "little") + text + bytes(9000)
        with pytest.raises(CorruptBlobError):
            taken(WIRE._sealed("name", payload), sizes(100_000))


@pytest.mark.parametrize(
    "heads",
    [
        '[[[-1], ""]]',
        '[[[1099511627776], ""]]',
        '[[[99], ""]]',
        '[[[1.5], ""]]',
        '[[["1"], ""]]',
        '[[[Infinity], ""]]',
        '[[[1], "\\ud800"]]',
        "[[[1], 3]]",
        f'[[{[1] * 200}, ""]]',
        '{"a": 1}',
        "[" * 5000,
    ],
)
def test_heads_that_are_not_the_models_are_not_taken_over(heads):
    data = WIRE._sealed("name", heads.encode())
    with suppress(CorruptBlobError):
        assert Wire(codec_by_name("raw"), sizes=sizes()).unpack_heads("name", data) == []


def test_one_bad_value_does_not_cost_its_neighbours(redis_at, tiers):
    url, a, b = f"redis://127.0.0.1:{redis_at.port}/7", module(90), module(91)
    offer(tiers(url), a, b)
    client = redis.Redis(port=redis_at.port, db=7)
    name = next(name for name in client.keys("*") if key(90).encode() in name)
    lie, honest = contents(key(90), a, codec_by_name("raw"))
    data = save(lie | {"extra": torch.zeros(3)}, honest)
    client.set(name, WIRE._sealed(name.decode().removeprefix("cached-rag/"), data))
    found, problems = tiers(url).fetch("", {key(90): a.token_ids, key(91): b.token_ids})
    assert found.keys() == {key(91)}
    assert len(problems) == 1
    client.close()


def test_who_waits_for_a_turn_while_the_tier_closes_is_told():
    calls = Calls(SimpleNamespace(label="redis://x"), 30)
    begun, ends = threading.Semaphore(0), threading.Event()
    with ThreadPoolExecutor() as others:
        for _ in range(transports.CALLS):
            others.submit(calls.ask, lambda: begun.release() or ends.wait())
            begun.acquire()
        late = others.submit(calls.ask, str)
        while sum(one.name == "remote" for one in threading.enumerate()) <= transports.CALLS:
            time.sleep(0.01)
        calls.close()
        with pytest.raises(StoreError, match="closed"):
            late.result()
        ends.set()


def test_closing_does_not_wait_for_a_server_that_is_gone(tmp_path, tiers):
    server = redis_server(tmp_path)
    tier = tiers(f"redis://127.0.0.1:{server.port}/0")
    server.kill()
    for n in range(5):
        tier.offer("", key(n), module(n))
    began = time.monotonic()
    tier.close(0.2)
    assert time.monotonic() - began < 3
    with pytest.raises(StoreError, match="closed"):
        fetch(tier, module(1))
    tier.offer("", key(1), module(1))  # nothing is sent, nothing raises


_SENDS_AND_ENDS = """
import time, torch
from cached_rag import StoreConfig
from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.remote import open_remote
tier = open_remote(StoreConfig(remote="s3://bucket/x"))
tier.offer("", "k" * 40, ModuleKV((1,), 0, torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)))
time.sleep(0.5)
tier.close(0.1)
"""


def test_a_process_ends_though_an_object_store_is_silent():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        keys = {f"AWS_{name}": "x" for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION")}
        given = os.environ | keys | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        ended = subprocess.run([sys.executable, "-c", _SENDS_AND_ENDS], env=given, timeout=50)
    assert ended.returncode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_asks_nothing_and_waits_for_nothing(redis_at, tiers):
    tier, kv = tiers(f"redis://127.0.0.1:{redis_at.port}/8"), module(1)
    offer(tier, kv)
    child = os.fork()
    if not child:  # no assertion may leave this process
        try:
            fetch(tier, kv)
        except StoreError:
            tier.offer("", key(2), module(2))
            tier.drain()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert fetch(tier, kv)


def test_of_a_value_that_is_too_long_the_beginning_is_taken(url, tiers):
    tier = tiers(url)
    tier._transport.put("long", b"x" * 100)
    tier._transport.put("short", b"y")
    assert tier._transport.get(["long", "short"], [9, 9]) == [b"x" * 9, b"y"]


def test_a_server_without_ranges_says_what_it_has(tmp_path):
    """As Python's own, which sends whole files whatever is asked for."""
    for name, data in (("full", b"cachedrag and more"), ("empty", b"")):
        (tmp_path / name).write_bytes(data)
    plain = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), plain) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        blobs = open_transport(f"http://127.0.0.1:{server.server_port}", 10.0)
        assert blobs.begin(["full", "empty", "none"], 9) == [b"cachedrag", b"", None]
        assert blobs.get(["full", "empty"], [9, 9]) == [b"cachedrag", b""]
        blobs.close()
        server.shutdown()
