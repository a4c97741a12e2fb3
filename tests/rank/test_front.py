from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import socket
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from flare.rank import front as module
from flare.rank.api_keys import read_keys
from flare.rank.engines.llama_cpp import LlamaCpp
from flare.rank.front import Front
from flare.rank.metrics import MetricsDocument, Serving, prometheus
from flare.rank.sockets import listen_http, url_of
from tests.rank.lab import never_loses_a_cancellation, run, until

PATH = "/v1/completions"


class Upstream:
    """A stand-in for the engine: real HTTP, with handlers that the test controls."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.seen: list[web.Request] = []
        self.cancelled = 0
        self.metrics = "llamacpp:prompt_tokens_total 5\nllamacpp:requests_processing 0\n"
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        application = web.Application()
        application.router.add_post(PATH, self.complete)
        application.router.add_post("/v1/responses", self.complete)
        application.router.add_get("/v1/models", self.models)
        application.router.add_get("/metrics", self.tell)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": []})

    async def tell(self, _request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        body = await request.json()
        if "status" in body:
            return web.json_response({"error": "x"}, status=body["status"])
        if body.get("stream"):
            return await self.stream(request, body)
        if body.get("wait"):
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return web.json_response({"got": body}, headers={"X-Secret": "engine"})

    async def stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if body.get("die"):
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(b"data: [DONE]\n\n")
        return response


class Lab:
    """A front before an upstream, and a client."""

    def __init__(self, keys: frozenset[bytes] = frozenset()) -> None:
        self.state = "serving"
        self.document = MetricsDocument(
            Serving("model", 4096, 1000), state=lambda: self.state, uptime=lambda: 1.5, wall_clock=lambda: 7.0
        )
        self.time = 0.0
        self.front = Front(LlamaCpp(), self.document, lambda: self.state, keys, lambda: self.time)
        self.upstream = Upstream()
        self.client: aiohttp.ClientSession
        self.url = ""

    def post(self, body: dict[str, Any], **options: Any) -> Any:
        return self.client.post(self.url + PATH, json=body, **options)

    async def status(self, body: dict[str, Any] | None = None, **options: Any) -> int:
        async with self.post(body or {}, **options) as response:
            await response.read()
            status: int = response.status
            return status


@contextlib.asynccontextmanager
async def opened(
    slots: int = 2,
    keys: frozenset[bytes] = frozenset(),
    engine: bool = True,
    paths: frozenset[str] = LlamaCpp.http_paths,
) -> AsyncIterator[Lab]:
    lab = Lab(keys)
    await lab.upstream.start()
    listening = await listen_http("127.0.0.1", 0)
    lab.url = url_of("127.0.0.1", listening[0])
    await lab.front.start("127.0.0.1", listening)
    if engine:
        lab.front.open(lab.upstream.port, slots, paths)
    async with aiohttp.ClientSession() as client:
        lab.client = client
        yield lab
    await lab.front.close()
    await lab.upstream.close()


def test_a_request_goes_through_and_only_its_own_headers() -> None:
    async def work() -> None:
        async with opened() as lab:
            headers = {"Authorization": "Bearer secret", "X-Forwarded-For": "1.2.3.4", "Cookie": "a=b"}
            async with lab.post({"prompt": "hi"}, headers=headers) as response:
                assert await response.json() == {"got": {"prompt": "hi"}}
                assert "X-Secret" not in response.headers
            seen = lab.upstream.seen[0].headers
            assert not {"Authorization", "X-Forwarded-For", "Cookie"} & set(seen)
            assert lab.document.requests.completed_total == 1
            async with lab.client.get(lab.url + "/v1/models") as response:
                assert await response.json() == {"data": []}

    run(work())


def test_responses_go_through_where_the_engine_has_them() -> None:
    async def work() -> None:
        path = "/v1/responses"
        async with opened(engine=False) as lab, lab.client.post(lab.url + path, json={}) as response:
            assert response.status == 503  # nobody knows yet
        async with opened() as lab, lab.client.post(lab.url + path, json={}) as response:
            assert response.status == 404
        key = hashlib.sha256(b"secret").digest()
        async with opened(keys=frozenset({key}), paths=frozenset({path})) as lab:
            async with lab.client.post(lab.url + path, json={}) as response:
                assert response.status == 401
            headers = {"Authorization": "Bearer secret"}
            async with lab.client.post(lab.url + path, json={"input": "hi"}, headers=headers) as response:
                assert (response.status, lab.upstream.seen[-1].path) == (200, path)

    run(work())


def test_events_are_not_held_back() -> None:
    async def work() -> None:
        async with opened() as lab, lab.post({"stream": True}) as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            assert await response.content.readany() == b"data: 1\n\n"  # the second is not written yet
            assert lab.document.requests.active == 1
            lab.upstream.release.set()
            assert await response.read() == b"data: [DONE]\n\n"

    run(work())


def test_a_client_that_leaves_cancels_the_engines_work() -> None:
    async def work() -> None:
        async with opened() as lab:
            async with lab.post({"stream": True}) as response:
                await response.content.readany()
                response.close()
            await until(lambda: lab.upstream.cancelled == 1)
            await until(lambda: lab.document.requests.failed_total == 1)
            task = asyncio.create_task(lab.status({"wait": True}))
            await until(lambda: len(lab.upstream.seen) == 2)
            task.cancel()
            await until(lambda: lab.upstream.cancelled == 2)
            assert lab.front.busy == 0

    run(work())


def test_more_requests_wait_in_line_and_then_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_FACTOR", 2)

    async def work() -> None:
        async with opened(slots=1) as lab:
            tasks = [asyncio.create_task(lab.status({"wait": True})) for _ in range(3)]
            counts = lab.document.requests
            await until(lambda: (counts.active, counts.queued) == (1, 2))
            async with lab.post({}) as response:
                assert response.status == 429
                assert response.headers["Retry-After"] == "5"
                assert (await response.json())["error"]["type"] == "queue_full"
            assert len(lab.upstream.seen) == 1
            tasks[2].cancel()  # one that waits leaves: its place is free
            await until(lambda: counts.queued == 1)
            lab.upstream.release.set()
            assert await asyncio.gather(*tasks[:2]) == [200, 200]
            assert (counts.active, counts.queued, counts.completed_total) == (0, 0, 2)

    run(work())


def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    async def work() -> None:
        async with opened() as lab:
            assert await lab.front.drain(1) is True  # nothing runs
        async with opened() as lab:
            task = asyncio.create_task(lab.status({"wait": True}))
            await until(lambda: lab.upstream.seen)
            draining = asyncio.create_task(lab.front.drain(60))
            await until(lambda: lab.front._draining)
            async with lab.client.get(lab.url + "/health") as response:
                assert (response.status, await response.json()) == (503, {"status": "draining"})
            async with lab.post({}) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "5")
            assert not draining.done()
            lab.upstream.release.set()
            assert await draining is True
            assert await task == 200

    run(work())


def test_a_stop_that_comes_with_the_end_of_a_drain_is_not_lost() -> None:
    async def work() -> None:
        front = Lab().front

        def begin() -> Coroutine[Any, Any, bool]:
            front._idle.clear()
            return front.drain(60)

        await never_loses_a_cancellation(begin, front._idle.set)

    run(work())


def test_a_drain_ends_in_time() -> None:
    async def work() -> None:
        async with opened() as lab:
            task = asyncio.create_task(lab.status({"wait": True}))
            await until(lambda: lab.upstream.seen)
            assert await lab.front.drain(0.05) is False
            assert lab.front.busy == 1
            task.cancel()

    run(work())


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/props", 404, "not_found"),
        ("POST", "/completion", 404, "not_found"),
        ("GET", "/v1/../slots", 404, "not_found"),
        ("POST", "/v1/completions/", 404, "not_found"),
        ("GET", PATH, 405, "method_not_allowed"),
        ("OPTIONS", PATH, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("DELETE", "/metrics", 405, "method_not_allowed"),
        ("GET", "/" + "a" * 7000, 404, "not_found"),
        ("POST", "/" + "a" * 9000, 404, "not_found"),
        ("GET", "/v1/models/" + "a/" * 50_000, 404, "not_found"),
    ],
)
def test_only_the_listed_paths_exist(method: str, path: str, status: int, code: str) -> None:
    async def work() -> None:
        async with opened() as lab, lab.client.request(method, lab.url + path) as response:
            assert response.status == status
            assert (await response.json())["error"]["type"] == code
            assert not lab.upstream.seen

    run(work())


def test_a_form_that_a_foreign_page_could_send_is_refused() -> None:
    async def work() -> None:
        async with opened() as lab:
            async with lab.client.post(lab.url + PATH, data=b'{"prompt": 1}') as response:
                assert response.status == 415
            assert not lab.upstream.seen

    run(work())


def test_a_body_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BODY", 1000)

    async def work() -> None:
        async with opened() as lab:
            assert await lab.status({"prompt": "x" * 2000}) == 413
            assert lab.front.busy == 0

    run(work())


def test_keys_are_asked_for_where_there_are_any(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# clients\nfirst\n\nsecond\n")
    file.chmod(0o600)

    async def work() -> None:
        async with opened(keys=read_keys(str(file))) as lab:
            for header, status in (
                ({}, 401),
                ({"Authorization": "Bearer third"}, 401),
                ({"Authorization": "Basic first"}, 401),
                ({"Authorization": "Bearer # clients"}, 401),
                ({"Authorization": "Bearer first"}, 200),
                ({"Authorization": "bearer second"}, 200),
            ):
                assert await lab.status({}, headers=header) == status, header
            for open_path in ("/health", "/metrics"):
                async with lab.client.get(lab.url + open_path) as response:
                    assert response.status == 200

    run(work())


def test_health_tells_the_state_from_the_start() -> None:
    async def work() -> None:
        async with opened(engine=False) as lab:
            lab.state = "verifying"
            async with lab.client.get(lab.url + "/health") as response:
                assert (response.status, await response.json()) == (503, {"status": "verifying"})
            async with lab.post({}) as response:
                assert response.status == 503
                assert "verifying" in (await response.json())["error"]["message"]
            async with lab.client.get(lab.url + "/metrics?format=json") as response:
                assert (await response.json())["prompt_tokens_total"] is None
            lab.state = "serving"
            async with lab.client.get(lab.url + "/health") as response:
                assert (response.status, await response.json()) == (200, {"status": "serving"})

    run(work())


def test_an_engine_that_is_gone_is_told_as_well_as_can_be() -> None:
    async def work() -> None:
        async with opened() as lab:
            async with lab.post({"stream": True, "die": True}) as response:
                await response.content.readany()
                lab.upstream.release.set()
                with pytest.raises(aiohttp.ClientError):  # the answer is cut, not made to look whole
                    await response.read()
            assert await lab.status({"status": 500}) == 500
            assert await lab.status({"status": 400}) == 400
            assert lab.document.requests.failed_total == 2
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            lab.front._engine = f"http://127.0.0.1:{port}"
            assert await lab.status({}) == 502

    run(work())


def test_metrics_join_the_engines_numbers_and_our_own() -> None:
    async def work() -> None:
        async with opened() as lab:
            await lab.status({})
            async with lab.client.get(lab.url + "/metrics?format=json") as response:
                document = await response.json()
            assert document == {
                "time": 7.0,
                "state": "serving",
                "model": "model",
                "uptime": 1.5,
                "prompt_tokens_total": 5,
                "generated_tokens_total": None,
                "verification_steps_total": None,
                "drafted_tokens_total": None,
                "accepted_tokens_total": None,
                "requests": {"active": 0, "queued": 0, "completed_total": 1, "failed_total": 0},
                "kv_tokens": {"used": None, "capacity": 4096},
                "decode_weight_bytes": 1000,
            }
            async with lab.client.get(lab.url + "/metrics") as response:
                text = await response.text()
                assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert 'flare_prompt_tokens_total{model="model"} 5\n' in text
            assert "flare_kv_tokens_used" not in text
            assert 'flare_up{model="model"} 1\n' in text

    run(work())


def test_the_engine_is_not_asked_more_often_than_needed() -> None:
    async def work() -> None:
        async with opened() as lab:
            assert (await lab.front.engine_metrics()).prompt_tokens_total == 5
            lab.upstream.metrics = "llamacpp:prompt_tokens_total 6\n"
            assert (await lab.front.engine_metrics()).prompt_tokens_total == 5
            lab.time += 1
            assert (await lab.front.engine_metrics()).prompt_tokens_total == 6
            await lab.upstream.close()
            lab.time += 1
            assert (await lab.front.engine_metrics()).prompt_tokens_total == 6  # the last that is known
            await lab.upstream.start()

    run(work())


def test_a_model_name_cannot_break_the_text_form() -> None:
    document = MetricsDocument(Serving('a"b\\c\nd'), state=lambda: "loading", uptime=lambda: 0.0)
    assert '{model="a\\"b\\\\c d"} 0' in prometheus(document.build(module.EngineMetrics()))


@contextlib.asynccontextmanager
async def half_sent(lab: Lab, sent: int = 1, length: int = 100) -> AsyncIterator[asyncio.StreamReader]:
    """Be a client that sends `sent` of `length` bytes of a body, and then waits."""
    host, _, port = lab.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {length}"
    )
    writer.write(head.encode() + b"\r\n\r\n" + b" " * sent)
    await writer.drain()
    try:
        yield reader
    finally:
        writer.close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{x",
        b"[]",
        b'"text"',
        b'{"prompt": "a"} {}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"prompt": [' + b"1," * (1 << 20) + b"1]}",
    ],
    ids=lambda body: body[:20].decode("latin-1"),
)
def test_what_is_no_json_object_is_the_clients_fault(body: bytes) -> None:
    async def work() -> None:
        async with opened() as lab:
            headers = {"Content-Type": "application/json"}
            async with lab.client.post(lab.url + PATH, data=io.BytesIO(body), headers=headers) as response:
                assert response.status == 400
                assert (await response.json())["error"]["type"] == "invalid_json"
            counts = lab.document.requests
            assert (len(lab.upstream.seen), lab.front.busy, counts.failed_total) == (0, 0, 0)
            assert await lab.status({}) == 200

    run(work())


@pytest.mark.parametrize(("levels", "status"), [(100, 200), (200, 400)])
def test_deep_schemas_pass_and_endless_ones_do_not(levels: int, status: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}

    async def work() -> None:
        async with opened() as lab, lab.client.post(lab.url + PATH, json={"json_schema": schema}) as response:
            assert response.status == status

    asyncio.run(work())


def test_a_body_that_is_announced_too_long_is_refused_before_it_comes() -> None:
    async def work() -> None:
        async with opened() as lab, half_sent(lab, 0, module.MAX_BODY + 1) as answer:
            line = await answer.readuntil(b"\r\n")
            assert line.startswith(b"HTTP/1.1 413 ")  # its words changed with Python 3.13
            assert b"Connection: close\r\n" in await answer.readuntil(b"\r\n\r\n")
            assert (lab.front._held, lab.front.busy) == (0, 0)

    run(work())


def test_a_body_that_breaks_off_in_its_middle_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_stream: object) -> bytes:
        raise web.RequestPayloadError

    async def work() -> None:
        async with opened() as lab:
            with monkeypatch.context() as patch:
                patch.setattr("aiohttp.StreamReader.readany", broken)
                async with half_sent(lab) as answer:
                    assert await answer.readuntil(b"\r\n") == b"HTTP/1.1 400 Bad Request\r\n"

    run(work())


def test_a_compressed_body_is_refused() -> None:
    async def work() -> None:
        async with opened() as lab:
            assert await lab.status({}, headers={"Content-Encoding": "gzip"}) == 415
            assert await lab.status({}, headers={"Content-Encoding": "identity"}) == 200

    run(work())


def test_clients_that_send_slowly_take_nobodys_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_FACTOR", 1)

    async def work() -> None:
        async with opened(slots=1) as lab, half_sent(lab), half_sent(lab), half_sent(lab):
            await until(lambda: lab.front._held == 3)
            assert (lab.front.busy, await lab.status({})) == (0, 200)
            assert await lab.front.drain(1) is True  # nor does anybody wait for them

    run(work())


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BODY_LIMIT", 0.1)

    async def work() -> None:
        async with opened() as lab, half_sent(lab) as answer:
            assert await answer.readuntil(b"\r\n") == b"HTTP/1.1 408 Request Timeout\r\n"
            await until(lambda: lab.front._held == 0)

    run(work())


def test_all_bodies_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HELD", 500)

    async def work() -> None:
        async with opened() as lab:
            async with half_sent(lab, 400, 1000):
                await until(lambda: lab.front._held == 400)
                async with lab.post({"prompt": "x" * 200}) as response:
                    assert (response.status, response.headers["Retry-After"]) == (503, "5")
                    assert (await response.json())["error"]["type"] == "too_much_held"
                assert await lab.status({}) == 200
            await until(lambda: lab.front._held == 0)
            assert await lab.status({"prompt": "x" * 200}) == 200

    run(work())


def test_a_body_that_came_after_the_drain_began_is_refused() -> None:
    async def work() -> None:
        async with opened() as lab, half_sent(lab, 1, 1) as answer, half_sent(lab) as late:
            assert await answer.readuntil(b"\r\n") == b"HTTP/1.1 400 Bad Request\r\n"  # no JSON
            await until(lambda: lab.front._held == 1)
            assert await lab.front.drain(1) is True
            assert not late.at_eof()

    run(work())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("192.0.2.7", 200),
        ("[::1]:8000", 200),
        ("[fe80::1%25eth0]:8000", 200),
        ("localhost:1", 200),
        ("LocalHost.", 200),
        ("model.localhost", 200),
        ("spark-1:8000", 200),
        ("spark-1.local", 200),
        ("spark-1.example.org:8000", 200),
        ("example.org", 403),
        ("evil.example:8000", 403),
        ("spark-1.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_a_name_that_was_made_to_lead_here_is_refused(
    host: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "spark-1")
    monkeypatch.setattr(module, "resolver_domains", lambda: ["example.org"])

    async def work() -> None:
        async with opened() as lab:
            async with lab.post({}, headers={"Host": host}) as response:
                assert response.status == status
                if status == 403:
                    assert "--api-key-file" in (await response.json())["error"]["message"]
            assert len(lab.upstream.seen) == (status == 200)
        async with opened(keys=frozenset({hashlib.sha256(b"key").digest()})) as lab:
            headers = {"Host": host, "Authorization": "Bearer key"}
            assert await lab.status({}, headers=headers) == 200  # who shows a key is no foreign page

    run(work())


def test_the_domains_that_the_resolver_adds() -> None:
    text = "# search no\nnameserver 10.0.0.1\nsearch Example.org lab.example.org.\n\ndomain old.example\n"
    assert module.domains_in(text) == ["example.org", "lab.example.org", "old.example"]


def test_an_engine_that_ends_before_its_answer_begins_is_told() -> None:
    async def work() -> None:
        async def end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        server = await asyncio.start_server(end, "127.0.0.1", 0)
        async with opened() as lab:
            lab.front._engine = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with lab.post({}) as response:
                assert response.status == 502
                assert (await response.json())["error"]["type"] == "engine_gone"
            assert lab.document.requests.failed_total == 1
        server.close()

    run(work())
