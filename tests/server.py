"""A small HTTP server that answers with a tiny target, in the words of OpenAI's protocol."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from data.chats.prompts import prompt_ids
from data.replies.generation import Request, generate, stop_ids
from data.targets.model import Target


@dataclass
class Behaviour:
    """What the server does; tests change it."""

    target: Target
    models: list[str] = field(default_factory=lambda: ["tiny"])
    failures: int = 0  # requests for a completion that get a 500 first
    key: str | None = None  # that it wants
    context: int = 512  # tokens
    tells_ids: bool = True  # as vLLM
    reply: dict[str, Any] = field(default_factory=dict)  # changes of the message
    finish: str | None = None  # instead of stop
    tokenizer: Any = None  # instead of the target's
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)  # for completions, as they came
    most_at_once: int = 0  # of them
    in_flight: int = 0
    lock: Any = field(default_factory=threading.Lock)


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[Behaviour]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if refusal := _refusal(self):
                return self.send(*refusal)
            models = [{"id": name, "object": "model"} for name in behaviour.models]
            self.send(200, {"object": "list", "data": models})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if refusal := _refusal(self):
                return self.send(*refusal)
            with behaviour.lock:
                behaviour.in_flight += 1
                behaviour.most_at_once = max(behaviour.most_at_once, behaviour.in_flight)
                behaviour.requests.append(request)
                is_failing = behaviour.failures > 0
                behaviour.failures -= is_failing
            try:
                if is_failing:
                    return self.send(500, error("out of luck"))
                self.send(*complete(behaviour, request))
            finally:
                with behaviour.lock:
                    behaviour.in_flight -= 1

        def send(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    def _refusal(handler: Handler) -> tuple[int, dict] | None:
        if handler.path not in ("/v1/models", "/v1/chat/completions"):
            return 404, error("Not Found")
        if behaviour.key and handler.headers["Authorization"] != f"Bearer {behaviour.key}":
            return 401, error("Incorrect API key")
        return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    behaviour.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield behaviour
    finally:
        server.shutdown()
        server.server_close()


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "error", "code": None}}


def complete(behaviour: Behaviour, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and body of a completion."""
    if request["model"] not in behaviour.models:
        return 404, error(f"The model `{request['model']}` does not exist.")
    target = behaviour.target
    tokenizer = behaviour.tokenizer or target.tokenizer
    prompt = prompt_ids(tokenizer, request["messages"])
    if len(prompt) + request["max_tokens"] > behaviour.context:
        return 400, error(f"This model's maximum context length is {behaviour.context} tokens.")
    with behaviour.lock:
        (ids,) = generate(
            target,
            [Request(prompt, request["max_tokens"], request["seed"])],
            stop_ids=stop_ids(target),
            temperature=request["temperature"],
            top_p=request["top_p"],
        )
    is_whole = ids[-1] in stop_ids(target)
    text = tokenizer.decode(ids[:-1] if is_whole else ids)
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, **behaviour.reply},
        "finish_reason": behaviour.finish or ("stop" if is_whole else "length"),
    }
    body: dict[str, Any] = {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": request["model"],
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "total_tokens": len(prompt) + len(ids),
        },
    }
    if behaviour.tells_ids and request["return_token_ids"]:
        choice["token_ids"] = ids
        body["prompt_token_ids"] = prompt
    return 200, body
