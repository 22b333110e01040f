"""A proxy between a client and the emulator of an object store: keeps preconditions, fails by plan,
counts.

It serialises the writes to one object and answers 412 itself, for generation preconditions (which
the emulator of GCS ignores) and for If-Match and If-None-Match alike. To an object of GCS that is
read it adds the header with its generation, which the emulator leaves out. `POST /__plan__` takes a
plan (JSON, the fields of `Plan`), `GET /__log__` returns the requests since the last `DELETE
/__log__`: [seconds, method, path, bytes, status]; the bytes are those of the body that was sent, or
of a GET those that came.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import random
import re
import socket
import sys
import threading
import time
from collections import defaultdict
from contextlib import nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit


@dataclasses.dataclass
class Plan:
    """What happens to requests from now on."""

    share: float = 0.0  # of the requests that fail
    at_most: int | None = None  # requests that fail, from the first on; None for any number
    # Of them: a status, `reset`, `truncate` (of what is read), `half` (the same, with a fitting
    # length), `pause`, or done and their answer lost: `lost` is answered by 425, `lost-503` by 503,
    # `lost-reset` by a broken connection.
    kinds: tuple[str, ...] = ("503", "429", "reset", "truncate")
    seed: int = 0
    delay_s: float = 0.0  # added to every request
    pause_s: float = 5.0  # of the kind `pause`
    down: bool = False  # every request fails
    # regular expression on method and path of the requests that fail, or are held; "" for all
    matching: str = ""
    bucket: str = ""  # the only one whose requests fail; "" for all
    # the first so many requests are held until all of them have come, and go on at the same moment
    together: int = 0
    full_after_bytes: int | None = None  # bodies of writes, in sum, after which writes are refused
    full_status: int = 507
    # regular expression on method, path and object of the requests that are answered by 403
    denied: str = ""


# Requests to the emulator at a time: its queue of connections is short, and what overflows it waits
# a second.
_UPSTREAM = 4
_HELD_S = 20.0  # at most
_DROPPED = {"connection", "transfer-encoding", "keep-alive", "content-length"}


class Proxy(ThreadingHTTPServer):
    """The proxy of one emulator."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, upstream: str) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.upstream = urlsplit(upstream)
        self.locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        # of objects of GCS that were written, by bucket and name
        self.generations: dict[str, str] = {}
        self.upstream_slots = threading.Semaphore(_UPSTREAM)
        self.log: list[list[Any]] = []
        self.plan_as({})

    def plan_as(self, fields: dict[str, Any]) -> None:
        self.plan = Plan(**fields)
        self.random = random.Random(self.plan.seed)
        self.written = self.failed = self.held = 0
        self.barrier = threading.Barrier(max(1, self.plan.together))

    def hold(self) -> None:
        """Returns once the others that are to come at the same moment are there, or do not come."""
        with self.locks[""]:
            self.held += 1
            is_held = self.held <= self.plan.together
        if is_held:
            with suppress(threading.BrokenBarrierError):
                self.barrier.wait(_HELD_S)

    def fetch(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, Any, bytes]:
        with self.upstream_slots:
            return self._fetch(method, path, headers, body)

    def _fetch(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, Any, bytes]:
        connection = http.client.HTTPConnection(
            self.upstream.hostname or "", self.upstream.port, timeout=60
        )
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        except (http.client.HTTPException, OSError):  # the emulator stumbled
            return 503, [], b""
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, *args: object) -> None:
        pass

    def _handle(self) -> None:
        body = self._body()
        if self.path.startswith("/__"):
            self._control(body)
            return
        plan, request = self.server.plan, f"{self.command} {unquote(self.path)}"
        if "uploadType=multipart" in self.path:
            request += str(self._written_object(body))  # which only the body names
        self.started, self.size = time.time(), len(body)
        if plan.delay_s:
            time.sleep(plan.delay_s)
        if plan.together and re.search(plan.matching, request):
            self.server.hold()
        if not self._planned(plan, request, len(body)):
            self._forward(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _handle

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _control(self, body: bytes) -> None:
        answer: Any = {}
        if self.path == "/__plan__":
            self.server.plan_as(json.loads(body))
        elif self.command == "DELETE":
            self.server.log.clear()
        else:
            answer = list(self.server.log)
        self._answer(200, [("Content-Type", "application/json")], json.dumps(answer).encode())

    def _planned(self, plan: Plan, request: str, size: int) -> bool:
        """Answers by plan; returns whether it did, or the request is to be forwarded."""
        if plan.denied and re.search(plan.denied, request):
            return self._refuse(403)
        if plan.full_after_bytes is not None and self.command in ("PUT", "POST"):
            self.server.written += size
            if self.server.written > plan.full_after_bytes:
                return self._refuse(plan.full_status)
        if plan.bucket not in request or (plan.matching and not re.search(plan.matching, request)):
            return False
        if not plan.down and self.server.random.random() >= plan.share:
            return False
        self.server.failed += 1
        if plan.at_most is not None and self.server.failed > plan.at_most:
            return False
        kind = "503" if plan.down else self.server.random.choice(plan.kinds)
        if kind == "pause":
            time.sleep(plan.pause_s)
            return False
        if kind == "reset":
            self._reset()
            return True
        if kind.startswith("lost"):
            self.loses = kind
            return False
        if kind in ("truncate", "half"):
            if self.command != "GET":
                return self._refuse(503)
            self.truncates, self.halves = kind == "truncate", kind == "half"
            return False
        return self._refuse(int(kind))

    truncates = halves = False
    loses = ""

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.close_connection = True
        self.connection.close()
        self._log(0)

    def _log(self, status: int) -> None:
        self.server.log.append([self.started, self.command, unquote(self.path), self.size, status])

    def _refuse(self, status: int) -> bool:
        code = {
            403: "AccessDenied",
            412: "PreconditionFailed",
            429: "SlowDown",
            507: "QuotaExceeded",
        }.get(status, "ServiceUnavailable")
        if "x-amz-date" in self.headers:
            kind = "application/xml"
            body = f"<Error><Code>{code}</Code><Message>by plan</Message></Error>"
        else:
            kind, body = (
                "application/json",
                json.dumps({"error": {"code": status, "message": f"{code} by plan"}}),
            )
        self._answer(status, [("Content-Type", kind)], body.encode())
        return True

    def _forward(self, body: bytes) -> None:
        name = self._written_object(body)
        with self.server.locks[name] if name else nullcontext():
            if name and not self._precondition_holds(name):
                self._refuse(412)
                return
            headers = {
                k: v for k, v in self.headers.items() if k.lower() not in _DROPPED | {"expect"}
            }
            status, answered, data = self.server.fetch(self.command, self.path, headers, body)
            if name and "x-amz-date" not in self.headers:
                self._note_generation(name, data)
        truncates, self.truncates = self.truncates, False
        loses, self.loses = self.loses, ""
        if loses == "lost-reset":
            self._reset()
            return
        if loses:
            self._refuse(503 if loses == "lost-503" else 425)
            return
        halves, self.halves = self.halves, False
        sent = data[: len(data) // 2] if halves else data
        self._answer(status, [*answered, *self._headers_of_content(status, data)], sent, truncates)

    def _note_generation(self, name: str, answered: bytes) -> None:
        """Keeps the generation that a write was answered with; a write without one makes it
        unknown.
        """
        try:
            self.server.generations[name] = json.loads(answered)["generation"]
        except (ValueError, KeyError, TypeError):
            self.server.generations.pop(name, None)

    def _headers_of_content(self, status: int, data: bytes) -> list[tuple[str, str]]:
        """Returns the headers with the generation and the length of the object whose content the
        request reads.
        """
        url = urlsplit(self.path)
        named = re.fullmatch(r"(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)", url.path)
        if self.command != "GET" or not named or parse_qs(url.query).get("alt") != ["media"]:
            return []
        generation = self.server.generations.get(f"/{named[1]}/{unquote(named[2])}")
        length = [("x-goog-stored-content-length", str(len(data)))] if status == 200 else []
        return [("x-goog-generation", generation), *length] if generation else length

    def _written_object(self, body: bytes) -> str | None:
        """Returns the bucket and name of the object that the request writes; None where it writes
        none.
        """
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if "x-amz-date" in self.headers:
            is_whole = self.command in ("PUT", "DELETE") and "partNumber" not in query
            is_completed = self.command == "POST" and "uploadId" in query
            return unquote(url.path) if is_whole or is_completed else None
        upload = re.fullmatch(r"(?:/upload/storage/v1)?/b/([^/]+)/o", url.path)
        if upload and self.command == "POST":
            found = re.search(rb'"name": ?("(?:[^"\\]|\\.)*")', body)
            name = query["name"][0] if "name" in query else json.loads(found[1]) if found else ""
            return f"/{upload[1]}/{name}"
        copied = re.search(r"/rewriteTo/b/([^/]+)/o/([^/]+)$", url.path)
        if copied and self.command == "POST":
            return f"/{copied[1]}/{unquote(copied[2])}"
        named = re.fullmatch(r"/storage/v1/b/([^/]+)/o/([^/]+)(?:/compose)?", url.path)
        return (
            f"/{named[1]}/{unquote(named[2])}"
            if named and self.command in ("POST", "DELETE")
            else None
        )

    def _precondition_holds(self, name: str) -> bool:
        wanted = parse_qs(urlsplit(self.path).query).get("ifGenerationMatch")
        if wanted:
            bucket, _, key = name[1:].partition("/")
            path = f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}"
            status, _, data = self.server.fetch("GET", path, {}, b"")
            generation = "0" if status == 404 else str(json.loads(data)["generation"])
            return generation == wanted[0]
        if_match, if_none = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        if not (if_match or if_none):
            return True
        headers = {
            k: v for k, v in self.headers.items() if k.lower() in ("authorization", "x-amz-date")
        }
        status, answered, _ = self.server.fetch("HEAD", urlsplit(self.path).path, headers, b"")
        etag = (
            next((v for k, v in answered if k.lower() == "etag"), None) if status == 200 else None
        )
        return (
            etag is None
            if if_none
            else etag is not None and etag.strip('"') == (if_match or "").strip('"')
        )

    def _answer(
        self, status: int, headers: list[tuple[str, str]], data: bytes, truncates: bool = False
    ) -> None:
        length = next((v for k, v in headers if k.lower() == "content-length"), str(len(data)))
        if not self.path.startswith("/__"):
            self.size = len(data) if self.command == "GET" else self.size
            self._log(status)
        self.send_response_only(status)
        for key, value in headers:
            if key.lower() not in _DROPPED:
                self.send_header(key, value)
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if truncates else data)
        if truncates:
            self.close_connection = True


if __name__ == "__main__":
    Proxy(int(sys.argv[1]), sys.argv[2]).serve_forever()
