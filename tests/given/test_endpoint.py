"""A live server: what it answers is kept and resumed, nobody else is contacted, and whatever it does wrong is one sentence."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import kvinterp as kv
from command_line import kvinterp, wrong
from kvinterp.comparison.given import asked, read_paths
from kvinterp.errors import InputError
from kvinterp.recording import endpoint
from kvinterp.recording.endpoint import Endpoint

Answer = Callable[[Any, dict[str, Any] | None], None]
TEXTS = [[1, 5, 9], [1, 7]]


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers as a function says; its address, and what it was asked."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self, None)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append(body)
            answer(self, body)

        def log_message(self, *given: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()


def send(handler: Any, content: bytes, status: int = 200, length: int | None = None, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"content-length": str(len(content) if length is None else length), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(content)


def right(handler: Any, body: dict[str, Any] | None) -> None:
    """Each next token is its predecessor and one, at -0.5; the prompt but its newest token is cached the second time."""
    if body is None:
        return send(handler, json.dumps({"data": [{"id": "m"}]}).encode())
    last, count = body["prompt"][-1], body["max_tokens"]
    tokens = [f"token_id:{last + n + 1}" for n in range(count)]
    cached = len(body["prompt"]) - 1 if body.get("cache_prompt") else 0
    logs = {"tokens": tokens, "token_logprobs": [-0.5] * count, "top_logprobs": [{t: -0.5} for t in tokens]}
    choice = {"text": "", "logprobs": logs, "token_ids": [last + n + 1 for n in range(count)]}
    return send(
        handler, json.dumps({"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": cached}}}).encode()
    )


@pytest.fixture
def model() -> Any:
    return kv.load_model("zoo:gqa2-mini", kind="native", dtype="float32")


def text_of(token: int) -> str:
    return f"t{token}"


def fetched(url: str, folder: Path, seconds: float = 20.0) -> Any:
    return Endpoint(url, folder, seconds=seconds).fetch(TEXTS, 4, text_of)


def test_each_token_is_asked_for_cold_and_warm_and_the_witness_is_read(tmp_path: Path, model: Any) -> None:
    with serving(right) as (url, seen):
        found = fetched(url, tmp_path)
    assert len(seen) == 2 + 2 * 8
    assert found.cached == (0, sum(at - 1 for text in TEXTS for at in range(len(text), len(text) + 4)))
    assert found.model == "m"
    assert [body["cache_prompt"] for body in seen[2:]] == [False] * 8 + [True] * 8
    assert len({body.get("cache_salt") for body in seen[2:10]}) == 8
    (one, other) = read_paths(model, found.cold)
    assert one.ids[:7] == (1, 5, 9, 10, 11, 12, 13)
    assert other.chosen[2:6].tolist() == [-0.5] * 4


def test_a_users_prompts_are_sent_whole_and_ours_are_short(tmp_path: Path, model: Any) -> None:
    """An engine caches whole blocks alone, of 16 to 128 tokens: a prompt that is cut shows nothing warm."""
    ids = list(range(1, 151))
    with serving(right) as (url, seen):
        asked(model, url, [ids], tmp_path / "one")
        assert seen[0]["prompt"] == ids
        seen.clear()
        asked(model, url, None, tmp_path / "ours")
        assert {len(body["prompt"]) for body in seen if body["max_tokens"] > 1} == {24}


def test_what_was_answered_before_a_server_died_is_not_asked_again(tmp_path: Path) -> None:
    count = 0

    def dying(handler: Any, body: Any) -> None:
        nonlocal count
        count += body is not None
        if count > 6:
            return handler.connection.close()
        return right(handler, body)

    with serving(dying) as (url, _):
        with pytest.raises(InputError, match=r"stopped in the middle|cannot be reached") as said:
            fetched(url, tmp_path)
        assert "6 answers are kept" in str(said.value)
        count = -100
        with open(tmp_path / "cold.jsonl", "a") as file:
            file.write('{"url": "cut')
        fetched(url, tmp_path)
        assert count == -100 + 18 - 6
        # A finished run is no beginning of another: the server may be another by now.
        fetched(url, tmp_path)
        assert count == -100 + 18 - 6 + 18


def test_what_another_server_answered_is_not_judged_as_this_ones(tmp_path: Path, model: Any) -> None:
    count = 0

    def dying(handler: Any, body: Any) -> None:
        nonlocal count
        count += body is not None
        return handler.connection.close() if count > 6 else right(handler, body)

    with serving(dying) as (url, _), pytest.raises(InputError, match="6 answers are kept"):
        fetched(url, tmp_path)
    with serving(right) as (url, _):
        found = fetched(url, tmp_path)
    for file in (found.cold, found.warm):
        assert [json.loads(line)["url"] for line in file.read_text().splitlines()] == [url] * 8


def test_an_answer_that_cannot_be_used_is_not_kept(tmp_path: Path) -> None:
    mended = False

    def answer(handler: Any, body: Any) -> None:
        (right if mended else no_tokens)(handler, body)

    with serving(answer) as (url, _):
        with pytest.raises(InputError, match="gives no log-probs with token ids"):
            fetched(url, tmp_path)
        mended = True
        assert fetched(url, tmp_path).cached == (0, 24)


def hanging(handler: Any, body: Any) -> None:
    time.sleep(1.5)


def dripping(handler: Any, body: Any) -> None:
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    for _ in range(20):
        with contextlib.suppress(OSError):
            handler.wfile.write(b" ")
            handler.wfile.flush()
        time.sleep(0.1)


def other_model(handler: Any, body: Any) -> None:
    content = [{"id": 30 + n, "token": f"word{n}", "logprob": -1.0, "top_logprobs": []} for n in range(4)]
    answer = {"data": []} if body is None else {"choices": [{"logprobs": {"content": content}}]}
    send(handler, json.dumps(answer).encode())


def no_tokens(handler: Any, body: Any) -> None:
    send(handler, json.dumps({"data": []} if body is None else {"choices": [{"text": "hello", "logprobs": None}]}).encode())


def saying(**choice: Any) -> Answer:
    content = json.dumps({"choices": [choice]}).encode()
    return lambda handler, body: send(handler, content if body else b'{"data": []}')


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (hanging, "gave no answer in time"),
        (dripping, "gave no answer in time"),
        (lambda handler, body: send(handler, b"<html>hello</html>"), "where JSON was expected"),
        (lambda handler, body: send(handler, b"{}", length=50), "stopped in the middle"),
        (lambda handler, body: send(handler, b"busy", 503), "answered 503 'busy'"),
        (lambda handler, body: send(handler, b"who are you", 401), "refused with 401: 'who are you'"),
        (lambda handler, body: send(handler, b"", 302, location="http://192.0.2.1/v1"), "a redirect to 'http://192.0.2.1/v1'"),
        (lambda handler, body: send(handler, b" " * (1 << 17)), "answered more than 0 MiB"),
        (lambda handler, body: send(handler, b"[1]"), "where JSON was expected"),
        (lambda handler, body: send(handler, b"{}"), "where choices were expected"),
        (lambda handler, body: send(handler, b'{"error": "\\u001b[31m"}'), "where choices were expected"),
        (other_model, "it runs another tokenizer"),
        (no_tokens, "gives no log-probs with token ids"),
        (saying(token_ids=7), "gives no log-probs with token ids"),
        (saying(logprobs={"content": 5}), "gives no log-probs with token ids"),
        (saying(logprobs={"tokens": 5}), "gives no log-probs with token ids"),
        (saying(token_ids=[5] * 1000), "wrote 1,000 tokens where 4 were asked for"),
    ],
)  # fmt: skip
def test_what_a_server_does_wrong_is_one_sentence(
    answer: Answer, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "TRIES", 2)
    monkeypatch.setattr(endpoint, "MOST", 1 << 16)
    monkeypatch.setattr("time.sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 1.5)))
    with serving(answer) as (url, _), pytest.raises(InputError) as said:
        fetched(url, tmp_path, 0.3)
    assert says in str(said.value)
    assert url in str(said.value)
    assert "\x1b" not in str(said.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://127.0.0.1:1/x",
        "http://a@127.0.0.1:1/v1",
        "http://127.0.0.1:99999999/v1",
        "http://127.0.0.1:1/\u00e9/v1",
        f"http://{'a' * 64}.invalid/v1",
    ],
)
def test_an_address_that_is_none_is_named(url: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no address of a server"):
        fetched(url, tmp_path)


def test_the_command_asks_a_server_and_says_that_it_saw_no_cache(tmp_path: Path) -> None:
    """It gives every token -0.5 and is of no model: that is no rounding, and without a witness warm is not judged."""

    def silent(handler: Any, body: Any) -> None:
        if body is not None:
            body["cache_prompt"] = False
            body["prompt"] = [min(t, 300) for t in body["prompt"]]
        right(handler, body)

    asked = (
        "--out",
        tmp_path / "out",
        "--answers",
        tmp_path / "kept",
        "--prompts",
        "Ben has 3 pens.",
        "--dtype",
        "float32",
    )
    with serving(silent) as (url, _):
        made = kvinterp("audit", "zoo:gqa2-mini", "--against", url, *asked)
    assert made.exit_code in (1, 3), made.output
    assert "nothing shows that the second time was warm" in made.stdout
    assert (tmp_path / "kept" / "cold.jsonl").exists()
    wrong("no server was given", "audit", "zoo:gqa2-mini", "--answers", tmp_path)


def test_a_header_that_drips_is_cut_off(tmp_path: Path) -> None:
    """Each byte resets a socket's own timeout: "3 tries of at most 2 s" took a minute."""

    def dripping(handler: Any, body: Any) -> None:
        with contextlib.suppress(OSError):
            for _ in range(100):
                handler.wfile.write(b"H")
                time.sleep(0.2)

    began = time.monotonic()
    with serving(dripping) as (url, _), pytest.raises(InputError, match="gave no answer in time"):
        fetched(url, tmp_path, seconds=1.0)
    assert time.monotonic() - began < 15


def test_a_server_that_gives_no_more_log_probs_is_named(tmp_path: Path) -> None:
    def forgetful(handler: Any, body: Any) -> None:
        if body is None or body["max_tokens"] > 1:
            return right(handler, body)
        return send(handler, json.dumps({"choices": [{"text": "", "logprobs": None}]}).encode())

    with serving(forgetful) as (url, seen), pytest.raises(InputError, match="gives no log-probs"):
        fetched(url, tmp_path)
    assert len(seen) == 3, "nothing more is asked of it"


def test_a_password_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no address of a server") as said:
        fetched("http://me:secret@127.0.0.1:1/v1", tmp_path)
    assert "secret" not in str(said.value)
