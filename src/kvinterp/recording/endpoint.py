"""A live server as a path that was walked elsewhere: what it answers is kept in files, which the readers read as any other's.

Each text is asked for a token at a time, once with nothing of it cached and once again, when all of it but the newest token can
be. Nothing but the address that was typed is contacted: no redirect is followed, and no proxy is asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvinterp.common.files import bytes_of, is_file, replaced
from kvinterp.errors import InputError, shown

SECONDS, TRIES, MOST = 60.0, 3, 1 << 24
"""How long an answer may take, how often it is asked for, and its most bytes."""
DONE = "whole"
"""The name of an empty file beside the answers, once all are there."""
TOP = 20
"""Log-probs asked for at each position, which servers allow: the chosen token is among them where it is likely."""


def is_endpoint(text: object) -> bool:
    """Whether a file's name is the address of a server."""
    return str(text).lower().startswith(("http:/", "https:/"))


@dataclasses.dataclass(frozen=True)
class Fetched:
    """What a server answered.

    Attributes:
        cold: The file of the answers with nothing cached.
        warm: That of the same requests again.
        cached: How many prompt tokens it took from its cache each time; None where it does not say.
        asked: How many prompt tokens it was sent each time.
        model: What it calls its model.
    """

    cold: Path
    warm: Path
    cached: tuple[int | None, int | None]
    asked: int
    model: str


class _FailedError(Exception):
    """An answer that another try may mend."""


@dataclasses.dataclass
class Endpoint:
    """An OpenAI-compatible server.

    Attributes:
        url: Its address, as ``http://127.0.0.1:8000/v1``.
        keep: The folder of what it answered; what is there already is not asked for again.
        tell: Told what is done next.
        seconds: How long an answer may take.
    """

    url: str
    keep: Path
    tell: Callable[[str], None] = lambda said: None
    seconds: float = SECONDS

    def __post_init__(self) -> None:
        try:
            found = urllib.parse.urlsplit(self.url)
            host, _ = found.hostname, found.port
        except ValueError:
            host, found = None, urllib.parse.urlsplit("")
        extra = found.username or found.query or found.fragment or not found.path.rstrip("/").endswith("/v1")
        # A label of a name has at most 63 letters.
        long = any(len(label) > 63 for label in (host or "").split("."))
        if not host or extra or long or not self.url.isascii() or any(c <= " " for c in self.url):
            typed = re.sub("//[^/]*@", "//...@", self.url)
            raise InputError(
                f"{shown(typed)} is no address of a server: expected one such as http://127.0.0.1:8000/v1; mend it."
            )
        self.parts, self.files = found, {name: self.keep / f"{name}.jsonl" for name in ("made", "cold", "warm")}
        if is_file(self.keep / DONE):
            # What was answered whole is asked for anew: the server may be another by now.
            for file in (*self.files.values(), self.keep / DONE):
                file.unlink(missing_ok=True)
        self.kept: dict[str, dict[str, Any]] = {
            self._key(name, each["request"]): each
            for name, file in self.files.items() for each in _records(file) if each["url"] == self.url
        }  # fmt: skip

    def _key(self, name: str, body: Mapping[str, Any]) -> str:
        return json.dumps([name, self.url, {k: v for k, v in body.items() if k != "cache_salt"}], sort_keys=True)

    # Asking ---------------------------------------------------------------------------------------------------------------

    def fetch(self, prompts: Sequence[Sequence[int]], steps: int, piece: Callable[[int], str]) -> Fetched:
        """Lets the server write behind each prompt, and asks for each of these tokens again, cold and warm.

        Args:
            prompts: Token ids.
            steps: How many tokens it writes.
            piece: The text of a token of the model here, by which another tokenizer is known.

        Raises:
            InputError: It does not answer, or not as such a server does; what it did answer is kept.
        """
        models = self._answer("GET", "/models", None, "its models").get("data")
        model = models[0].get("id") if isinstance(models, list) and models and isinstance(models[0], dict) else None
        texts = []
        for number, prompt in enumerate(prompts):
            self.tell(f"text {number + 1} of {len(prompts)}")
            # Drawn as the model has it: of what it is sure of there is little to see.
            drawn = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "seed": number, "ignore_eos": True}
            body = {**_body(model, prompt), "max_tokens": steps, **drawn}
            answer = self._kept("made", body, lambda found: self._written(found, steps, piece))
            texts.append((len(prompt), [*prompt, *self._written(answer, steps, piece)]))
        cached: dict[str, int | None] = {}
        asked = sum(at for begun, text in texts for at in range(begun, len(text)))
        for name in ("cold", "warm"):
            total: int | None = 0
            used = []
            for number, (begun, text) in enumerate(texts):
                for at in range(begun, len(text)):
                    self.tell(f"{name}: token {at - begun + 1} of text {number + 1} of {len(texts)}")
                    # llama.cpp is told not to look, vLLM that it never saw this text.
                    body = {**_body(model, text[:at]), "cache_prompt": name == "warm"}
                    if name == "cold":
                        body["cache_salt"] = f"cold-{number}-{at}-{time.time_ns()}"
                    said = _cached(self._kept(name, body, self._has_log_probs))
                    used.append(self.kept[self._key(name, body)])
                    total = None if said is None or total is None else total + said
            cached[name] = total
            # What else is kept there was asked of another server, or for other texts.
            with replaced(self.files[name]) as file:
                file.write("".join(json.dumps(each) + "\n" for each in used).encode())
        (self.keep / DONE).touch()
        return Fetched(self.files["cold"], self.files["warm"], (cached["cold"], cached["warm"]), asked, str(model))

    def _written(self, answer: Mapping[str, Any], steps: int, piece: Callable[[int], str]) -> list[int]:
        """The ids that the server wrote, and whether they are this model's: each has the text that it has here."""
        choice = answer["choices"][0] if isinstance(answer["choices"][0], dict) else {}
        logs = choice.get("logprobs") if isinstance(choice.get("logprobs"), dict) else {}
        logs = logs or {}
        content, tokens, ids = (
            found if isinstance(found, list) else []
            for found in (logs.get("content"), logs.get("tokens"), choice.get("token_ids"))
        )
        entries = [e for e in content if isinstance(e, dict)]
        texts = [e.get("token") for e in entries] or tokens
        ids = (
            ids
            or [e.get("id") for e in entries]
            or [int(str(t)[9:]) if re.fullmatch(r"token_id:\d{1,9}", str(t)) else None for t in texts]
        )
        if not ids or any(type(i) is not int or i < 0 for i in ids):
            raise self._wrong(
                f"gives no log-probs with token ids ({shown(choice)}): it needs logprobs and return_token_ids"
            )
        if len(ids) > steps:
            raise self._wrong(f"wrote {len(ids):,} tokens where {steps:,} were asked for: it does not heed max_tokens")
        named = [(i, t) for i, t in zip(ids, texts, strict=False) if isinstance(t, str) and not t.startswith("token_id:")]
        try:
            other = [(i, t) for i, t in named if t.isascii() and piece(i).isascii() and piece(i).strip() != t.strip()]
        except (IndexError, OverflowError, InputError):
            raise self._wrong(f"wrote token {max(ids)}, which this model has not: it runs another one") from None
        if 2 * len(other) > len(named):
            at, text = other[0]
            raise self._wrong(
                f"calls token {at} {shown(text)}, and here it is {shown(piece(at))}: it runs another tokenizer"
            )
        return list(ids)

    def _has_log_probs(self, answer: Mapping[str, Any]) -> None:
        choice = answer["choices"][0]
        if not isinstance(choice, dict) or not choice.get("logprobs"):
            raise self._wrong(f"gives no log-probs ({shown(choice)}): it needs logprobs")

    def _wrong(self, what: str) -> InputError:
        done = len(self.kept)
        kept = (
            f"; {done} answers are kept in {shown(str(self.keep))}, and the same command goes on from there" if done else ""
        )
        return InputError(f"the server at {shown(self.url)} {what}{kept}; mend it and ask again.")

    def _kept(
        self, name: str, body: Mapping[str, Any], check: Callable[[Mapping[str, Any]], object] = lambda found: None
    ) -> dict[str, Any]:
        """An answer, from the file where it was given before; else asked for and, once it is checked, written there."""
        key = self._key(name, body)
        if key not in self.kept:
            number = sum(1 for each in self.kept if each.startswith(f'["{name}"')) + 1
            found = self._answer("POST", "/completions", body, f"request {number} ({name})")
            choices = found.get("choices")
            if not isinstance(choices, list) or not choices:
                raise self._wrong(f"answered {shown(found)} where choices were expected: it is no OpenAI-compatible server")
            check(found)
            self.keep.mkdir(parents=True, exist_ok=True)
            self.kept[key] = {"url": self.url, "request": body, "response": found}
            with self.files[name].open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.kept[key]) + "\n")
        return self.kept[key]["response"]  # type: ignore[no-any-return]

    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None, what: str) -> dict[str, Any]:
        why = ""
        for again in range(TRIES):
            if again:
                time.sleep(0.25 * 4**again)
            try:
                return self._once(method, path, body)
            except _FailedError as error:
                why = str(error)
            except (OSError, http.client.HTTPException) as error:
                cut = isinstance(error, http.client.IncompleteRead | http.client.RemoteDisconnected | ConnectionResetError)
                slow = isinstance(error, TimeoutError)
                why = (
                    "stopped in the middle of an answer"
                    if cut
                    else "gave no answer in time"
                    if slow
                    else f"cannot be reached ({error})"
                )
        raise self._wrong(f"{why} ({what}, {TRIES} tries of at most {self.seconds:g} s)")

    def _once(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        secure = self.parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        until = time.monotonic() + self.seconds
        with contextlib.closing(kind(str(self.parts.hostname), self.parts.port, timeout=self.seconds)) as connection:
            sent = None if body is None else json.dumps(body)
            connection.request(method, self.parts.path.rstrip("/") + path, sent, {"Content-Type": "application/json"})
            # A socket's timeout is of each piece, and of one that drips there is no end.
            cut = threading.Timer(until - time.monotonic(), _shut, [connection.sock])
            cut.start()
            try:
                answer, content = connection.getresponse(), b""
                while piece := answer.read1(1 << 16):
                    content += piece
                    if len(content) > MOST:
                        raise self._wrong(f"answered more than {MOST >> 20} MiB")
                if answer.length or time.monotonic() >= until:
                    raise http.client.IncompleteRead(content)
            except (OSError, http.client.HTTPException):
                if time.monotonic() >= until:
                    raise TimeoutError from None
                raise
            finally:
                cut.cancel()
        said = shown(content[:200].decode("utf-8", "replace"))
        if answer.status in (408, 429) or answer.status >= 500:
            raise _FailedError(f"answered {answer.status} {said}")
        if 300 <= answer.status < 400:
            raise self._wrong(f"answered with a redirect to {shown(answer.getheader('Location'))}, which is not followed")
        if answer.status != 200:
            raise self._wrong(f"refused with {answer.status}: {said}")
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self._wrong(f"answered {said} where JSON was expected: it is no OpenAI-compatible server")
        return found


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _body(model: Any, ids: Sequence[int]) -> dict[str, Any]:
    ways = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    named = {"model": model} if isinstance(model, str) else {}
    return {**named, "prompt": list(ids), "max_tokens": 1, "temperature": 0, "logprobs": TOP, **ways}


def _cached(answer: Mapping[str, Any]) -> int | None:
    """How many tokens of the prompt the server took from its cache, where it says so."""
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    found = details.get("cached_tokens") if isinstance(details, dict) else None
    return found if type(found) is int else None


def _records(file: Path) -> list[dict[str, Any]]:
    """What was kept; a line that was cut off is asked for again."""
    if not is_file(file):
        return []
    found = []
    for line in bytes_of(file, 1 << 30).decode("utf-8", "replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            each = json.loads(line)
            if isinstance(each, dict) and isinstance(each.get("request"), dict) and isinstance(each.get("response"), dict):
                found.append({"url": "", **each})
    return found
