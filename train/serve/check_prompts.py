"""The prompts that a check decodes, as the token ids of the dump's template."""

import logging
from dataclasses import dataclass

from data.chats.prompts import Prompt, prompt_ids, read_prompt_sets
from data.targets.model import load_config, load_tokenizer
from train.config import CheckConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The prompts of one set that are short enough."""

    name: str
    prompts: list[Prompt]
    tokens: list[list[int]]
    left_out: int


def read_sets(config: CheckConfig) -> list[PromptSet]:
    """The prompt sets, less what is too long."""
    tokenizer = load_tokenizer(config.target)
    sets = []
    for name, prompts in read_prompt_sets(config.prompts, limit=config.limit).items():
        tokens = [prompt_ids(tokenizer, prompt.messages) for prompt in prompts]
        short = [i for i, ids in enumerate(tokens) if len(ids) <= config.max_prompt_tokens]
        if not short:
            raise ValueError(
                f"No prompt of {name} has at most {config.max_prompt_tokens} tokens "
                "(max_prompt_tokens)."
            )
        left_out = len(tokens) - len(short)
        log.info("prompts     %s: %d, %d left out as too long", name, len(short), left_out)
        sets.append(
            PromptSet(
                name=name,
                prompts=[prompts[i] for i in short],
                tokens=[tokens[i] for i in short],
                left_out=left_out,
            )
        )
    return sets


def steps_of(config: CheckConfig) -> list[int]:
    """The numbers of draft steps that are checked."""
    steps = config.num_steps
    return list(steps) if isinstance(steps, (list, tuple)) else [steps]


def max_model_len(config: CheckConfig, sets: list[PromptSet]) -> int:
    # Near its limit an engine drafts fewer tokens, so leave room for two whole rounds.
    room = 2 * (max(steps_of(config)) + 1)
    longest = max(len(ids) for one in sets for ids in one.tokens)
    length = longest + config.max_new_tokens + room
    limit = load_config(config.target).get_text_config().max_position_embeddings
    if length > limit:
        raise ValueError(
            f"The longest prompt with {config.max_new_tokens} new tokens needs {length} positions, "
            f"but {config.target.path} has {limit}. Lower max_prompt_tokens or max_new_tokens."
        )
    return length
