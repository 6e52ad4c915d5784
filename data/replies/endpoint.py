"""Answers of a server that speaks OpenAI's protocol: vLLM, SGLang and others.

The server is sent messages, and makes the prompt with its own copy of the target's template. That
it is the dump's prompt is checked by its token ids, or by their number where the server tells no
more. vLLM also tells the ids of the reply, so that the reply is checked as a local one is.

What keeps a reply out, besides the rules in data/replies/rules.py:

    prompt longer than the server's context
    prompt that the server makes otherwise than the target's template
    thoughts that the server keeps apart     start it without a reasoning parser
    another end than an end-of-turn token    a content filter, a tool call
"""

import asyncio
import os
import re
from collections.abc import Iterator
from typing import Any

import openai

from data.chats.prompts import prompt_ids
from data.config import RegenerateConfig
from data.replies.log import ReplyLog
from data.replies.rules import MIN_ROOM, NO_ROOM, Advance, Answer, Chat, reply_seed

RETRIES = 8  # of one request, about 40 s in all; the client waits longer each time
TIMEOUT = 1800.0  # seconds for one reply
CONTEXT = re.compile(r"context[ _](length|size|window)", re.IGNORECASE)
TOO_LONG = "reply whose prompt is longer than the server's context"
OTHER_PROMPT = "reply to a prompt that the server makes otherwise than the template"
APART = "reply whose thoughts the server keeps apart"
PROBE = [{"role": "user", "content": "Hello"}]


class Server:
    """A server, and the model on it that answers."""

    def __init__(self, config: RegenerateConfig, model: str | None) -> None:
        """Raises RuntimeError if no server answers, ValueError for a model that is not there."""
        assert config.endpoint
        self._config = config
        self.url = config.endpoint.rstrip("/")
        self.model = self._run(self._find_model(model))

    def check_prompt(self, tokenizer: Any) -> None:
        """Raise ValueError if the server makes another prompt than the target's template."""
        problem = self._run(self._probe(tokenizer))
        if problem:
            raise ValueError(
                f"{self.model} at {self.url} makes another prompt than the template of "
                f"{self._config.target.path}: {problem}. Features must come from the text that is "
                "served: serve that target with that template, or give the target that is served."
            )

    def answer(self, chats: Iterator[Chat], replies: ReplyLog, advance: Advance) -> None:
        """Write the replies of all chats into the log, `concurrency` chats at a time."""
        self._run(self._answer(chats, replies, advance))

    async def _answer(self, chats: Iterator[Chat], replies: ReplyLog, advance: Advance) -> None:
        async def work(client: openai.AsyncOpenAI) -> None:
            for chat in chats:  # shared: each chat is taken once
                while not chat.is_done:
                    reply = replies.find(chat.id, chat.number)
                    was_there = reply is not None
                    if reply is None:
                        reply = chat.judge(await self._ask(client, chat))
                        replies.append([reply])
                    advance(chat.go_on(reply), reply, was_there)

        async with self._client(RETRIES) as client:
            await asyncio.gather(*(work(client) for _ in range(self._config.concurrency)))

    async def _ask(self, client: openai.AsyncOpenAI, chat: Chat) -> Answer:
        if chat.room < MIN_ROOM:
            return Answer(problem=NO_ROOM)
        try:
            seed = reply_seed(self._config.seed, chat.id, chat.number)
            completion = await self._complete(
                client, chat.messages, max_tokens=chat.room, seed=seed
            )
        except openai.BadRequestError as error:
            if CONTEXT.search(str(error)):
                return Answer(problem=TOO_LONG)
            raise
        choice = completion.choices[0]
        if _other_prompt(completion, chat.prompt):
            return Answer(problem=OTHER_PROMPT)
        if _extra(choice.message, "reasoning_content") or _extra(choice.message, "reasoning"):
            return Answer(problem=APART)
        ids = _extra(choice, "token_ids")
        tokens = completion.usage.completion_tokens if completion.usage else 0
        if choice.finish_reason == "length":
            return chat.cut(tokens)
        if choice.finish_reason != "stop":
            return Answer(problem=f"reply that the server ends with {choice.finish_reason!r}")
        return Answer(choice.message.content or "", ids, tokens)

    async def _complete(
        self,
        client: openai.AsyncOpenAI,
        messages: list[dict[str, str]],
        *,
        max_tokens: int,
        seed: int,
    ) -> Any:
        config = self._config
        return await client.chat.completions.create(
            model=self.model,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            seed=seed,
            # vLLM's; others do not mind.
            extra_body={"return_token_ids": True, "skip_special_tokens": False},
        )

    async def _find_model(self, wanted: str | None) -> str:
        async with self._client(1) as client:
            names = [model.id for model in (await client.models.list()).data]
        if wanted is None and len(names) == 1:
            return names[0]
        if wanted not in names:
            raise ValueError(
                f"model={'null' if wanted is None else wanted} is none of the models at "
                f"{self.url}: {', '.join(names) or 'it has none'}. Give model=NAME."
            )
        return wanted

    async def _probe(self, tokenizer: Any) -> str | None:
        async with self._client(RETRIES) as client:
            completion = await self._complete(client, PROBE, max_tokens=1, seed=0)
        return _other_prompt(completion, prompt_ids(tokenizer, PROBE), tokenizer)

    def _client(self, retries: int) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=self.url,
            api_key=os.environ.get("OPENAI_API_KEY") or "none",
            max_retries=retries,
            timeout=TIMEOUT,
        )

    def _run(self, work: Any) -> Any:
        """Run a coroutine; what the server does wrong is raised in our words."""
        again = "The replies so far are safe: run the same command again."
        try:
            return asyncio.run(work)
        except openai.APIConnectionError as error:
            raise RuntimeError(
                f"No server answers at {self.url} ({error.__cause__ or error}). Start it, with "
                f"vLLM for instance: vllm serve {self._config.target.path}. {again}"
            ) from error
        except openai.AuthenticationError as error:
            raise ValueError(
                f"{self.url} wants another API key: set OPENAI_API_KEY ({error})."
            ) from error
        except openai.NotFoundError as error:
            raise ValueError(
                f"{self.url} has no such address or model ({error}). Expected "
                "endpoint=http://HOST:PORT/v1."
            ) from error
        except openai.APIStatusError as error:
            raise RuntimeError(f"{self.url} refuses a request: {error}. {again}") from error


def _other_prompt(completion: Any, ours: list[int], tokenizer: Any = None) -> str | None:
    """What is different in the server's prompt, as far as it says what it made."""
    theirs = _extra(completion, "prompt_token_ids")
    count = completion.usage.prompt_tokens if completion.usage else len(ours)
    if theirs is None:
        return None if count == len(ours) else f"{count} tokens there, {len(ours)} here"
    if theirs == ours:
        return None
    texts = [ids if tokenizer is None else repr(tokenizer.decode(ids)) for ids in (theirs, ours)]
    return f"{texts[0]} there, {texts[1]} here"


def _extra(record: Any, name: str) -> Any:
    """A field that is not in OpenAI's own protocol."""
    return (record.model_extra or {}).get(name)
