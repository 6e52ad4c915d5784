"""Let the target write the replies of the chats, so that a head learns what the target says.

The replies go into a log as they come (OUT.part), and at the end, in the order of the input, into
OUT with the record of their origin beside it. A run that is killed goes on where it stopped: the
batches are a function of the chats and of the replies so far, so the log's replies are taken as if
they had just been written, and the rest are computed in the very batches of an undisturbed run.
"""

import logging
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.chats.conversations import Counts, read_conversations
from data.config import RegenerateConfig
from data.dump.plan import dataset_settings, settings_differences
from data.files import sha256
from data.lock import locked
from data.processes import stoppable
from data.replies.file import write_chats
from data.replies.generation import answer_here
from data.replies.log import ReplyLog
from data.replies.origin import FORMAT_VERSION, origin_path, read_origin, write_origin
from data.replies.rules import Chat, Reply, end_token
from data.targets.model import (
    fingerprint,
    fingerprint_differences,
    load_config,
    load_target,
    load_tokenizer,
    target_dtype,
)

log = logging.getLogger(__name__)


def regenerate(config: RegenerateConfig) -> Path:
    """Answer the user turns of `config.dataset` anew. Returns the file, in the `messages` dialect.

    Raises ValueError for what the user can mend (settings, files, template, model name), and
    RuntimeError if another run writes the file, or the server or the device fails.
    """
    out = Path(config.out).expanduser()
    with stoppable("stopped: the same command goes on from here"):
        tokenizer = _checked(config)
        part = out.with_name(f"{out.name}.part")
        busy = f"Another run is writing {part}. Wait for it, or give another out=FILE."
        with locked(part, busy=busy):
            try:
                _regenerate(config, out, part, tokenizer)
            finally:
                if part.is_file() and not part.stat().st_size:  # nothing came of it
                    part.unlink()
    return out


def _regenerate(config: RegenerateConfig, out: Path, part: Path, tokenizer: Any) -> None:
    identity = _identity(config)
    if _is_finished(out, identity):
        log.info("%s is finished: nothing to do.", out)
    else:
        with part.open("a+b") as file:
            replies = ReplyLog(part, file)
            _check_same(out, identity, replies.header)
            _answer(config, tokenizer, replies, identity)
            counts = write_chats(config.dataset, replies, out)
        write_origin(
            out,
            fingerprint=identity["fingerprint"],
            settings=identity["settings"],
            endpoint=config.endpoint,
            counts=counts,
        )
        log.info(
            "%s is finished. Next: python -m scripts.dump_features target=%s dataset=%s",
            out,
            config.target.path,
            out,
        )
    os.truncate(part, 0)  # the record is written: from now on it is not needed


# --- what is done ------------------------------------------------------------------------------


def _checked(config: RegenerateConfig) -> Any:
    """Refuse what cannot work, before the target is loaded. Returns its tokenizer."""
    if config.endpoint and find_spec("openai") is None:
        raise ValueError(
            "endpoint=... needs a package that is not installed: pip install -e '.[endpoint]'. "
            "Without an endpoint the target runs here, in Transformers."
        )
    if not config.endpoint and config.target.engine != "transformers":
        raise ValueError(
            f"target.engine={config.target.engine} computes features only. Serve the target with "
            "it and give endpoint=http://HOST:PORT/v1, or leave target.engine out."
        )
    positions = load_config(config.target).get_text_config().max_position_embeddings
    if config.max_length > positions:
        raise ValueError(
            f"max_length is {config.max_length}, but the target knows {positions} positions "
            f"(max_position_embeddings). Set max_length={positions} or less."
        )
    tokenizer = load_tokenizer(config.target)
    end_token(tokenizer)
    return tokenizer


def _identity(config: RegenerateConfig) -> dict[str, Any]:
    """What must be the same for a run to go on."""
    settings: dict[str, Any] = dataset_settings(config.dataset)
    settings["written_by"] = "endpoint" if config.endpoint else "target"
    settings["model"] = config.model
    if not config.endpoint:
        dtype = target_dtype(config.target, load_config(config.target))
        settings["target.dtype"] = str(dtype).removeprefix("torch.")
    for name in ("temperature", "top_p", "seed", "max_new_tokens", "max_length"):
        settings[name] = getattr(config, name)
    return {
        "format_version": FORMAT_VERSION,
        "settings": settings,
        "fingerprint": fingerprint(config.target),
    }


def _is_finished(out: Path, identity: dict[str, Any]) -> bool:
    record = read_origin(out) if out.exists() else None
    if record is None:
        return False
    _check_same(out, identity, record)
    if record["sha256"] != sha256(out):
        raise ValueError(
            f"{out} has changed since it was written: it is not what {origin_path(out)} says. "
            "Give another out=FILE, or move it away."
        )
    return True


def _check_same(out: Path, ours: dict[str, Any], theirs: dict[str, Any] | None) -> None:
    """Raise ValueError unless the log or the record that is there is of the same run.

    A model that was not named is the one that was found then: `ours` gets its name.
    """
    if theirs is None:
        if out.exists():
            raise ValueError(
                f"{out} is there already, and no run of this command wrote it. Give another "
                "out=FILE, or move it away."
            )
        return
    if theirs.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{out} was begun by another version (format_version {theirs.get('format_version')}, "
            f"here {FORMAT_VERSION}). Give another out=FILE, or delete it."
        )
    settings = ours["settings"]
    settings["model"] = settings["model"] or theirs["settings"]["model"]
    differences = settings_differences(settings, theirs["settings"])
    differences += fingerprint_differences(ours["fingerprint"], theirs["fingerprint"])
    if differences:
        lines = "\n".join(f"  {line}" for line in differences)
        raise ValueError(
            f"{out} was made with other settings:\n{lines}\n"
            "Give another out=FILE, or the settings of before, or delete it and what lies beside "
            f"it ({out.name}.part, {origin_path(out).name})."
        )


# --- the replies -------------------------------------------------------------------------------


def _answer(
    config: RegenerateConfig, tokenizer: Any, replies: ReplyLog, identity: dict[str, Any]
) -> None:
    """Write every reply that is missing into the log."""
    server = None
    if config.endpoint:
        from data.replies.endpoint import Server  # here, so that the package is needed only for it

        server = Server(config, identity["settings"]["model"])
        identity["settings"]["model"] = server.model
        server.check_prompt(tokenizer)
    num_chats, num_replies = _count(config)
    if replies.header is None:
        replies.begin(identity)
    else:
        log.info("resume: %s replies are there", f"{len(replies):,}")
    log.info(
        "plan: up to %s replies of %s chats, %s, at most %d tokens each and %d a chat",
        f"{num_replies:,}",
        f"{num_chats:,}",
        "greedy" if not config.temperature else f"temperature {config.temperature:g}",
        config.max_new_tokens,
        config.max_length,
    )
    chats = (
        Chat(
            conversation,
            tokenizer,
            max_new_tokens=config.max_new_tokens,
            max_length=config.max_length,
        )
        for conversation in read_conversations(config.dataset, Counts())
    )
    target = load_target(config.target) if server is None else None
    with _Progress(num_replies) as progress:
        if server is not None:
            server.answer(chats, replies, progress.advance)
        elif target is not None:
            answer_here(target, chats, replies, config, progress.advance)


def _count(config: RegenerateConfig) -> tuple[int, int]:
    """Chats, and user turns in them."""
    counts = Counts()
    num_chats = num_replies = 0
    conversations = read_conversations(config.dataset, counts)
    for conversation in tqdm(conversations, desc="read", unit=" chats", delay=1):
        num_chats += 1
        num_replies += sum(turn.role == "user" for turn in conversation.turns)
    log.info("read: %s", counts.summary())
    return num_chats, num_replies


class _Progress:
    """A bar over the replies; those that a chat ends before count as done."""

    def __init__(self, num_replies: int) -> None:
        self._tokens, self._began = 0, time.monotonic()
        self._bar = tqdm(
            total=num_replies,
            desc="regenerate",
            unit=" replies",
            mininterval=1 if sys.stderr.isatty() else 30,  # a log file wants fewer lines
        )

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, count: int, reply: Reply, was_there: bool) -> None:
        if was_there:
            self._bar.initial += count  # no part of the rate
        else:
            self._tokens += reply.tokens
            rate = self._tokens / (time.monotonic() - self._began)
            self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._bar.update(count)
