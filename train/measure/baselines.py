"""Speculation that needs no training, as Transformers has it: what a head is to be compared with.

prompt_lookup   drafts are copied from where the last tokens stood before
assistant       a smaller model with the same vocabulary drafts
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from data.config import TargetConfig
from data.targets.model import Target, load_target
from train.config import EvaluateConfig

log = logging.getLogger(__name__)

LOOKUP_TOKENS = 10  # draft tokens of prompt_lookup, as the Transformers documentation has it

Baseline = Callable[[Tensor], dict[str, Any]]


def load_baselines(config: EvaluateConfig, target: Target) -> dict[str, Baseline]:
    """What answers a prompt, [T], in each way that `config` names.

    An answer is {tokens, seconds: {total}, forwards}: all forwards of the target, the one over the
    prompt included, as it checks drafts too.

    Raises ValueError for an assistant of another vocabulary.
    """
    arguments: dict[str, dict[str, Any]] = {}
    for name in config.baselines:
        if name == "prompt_lookup":
            arguments[name] = {"lookup_tokens": LOOKUP_TOKENS}
        else:
            arguments[name] = {"assistant": _assistant(config, target)}
    return {name: _baseline(target, config, each) for name, each in arguments.items()}


def _assistant(config: EvaluateConfig, target: Target) -> Any:
    assert config.assistant  # the config says so where it names the baseline
    assistant = load_target(TargetConfig(path=config.assistant, device=str(target.device)))
    ours, theirs = target.tokenizer.get_vocab(), assistant.tokenizer.get_vocab()
    if ours != theirs:
        raise ValueError(
            f"The assistant {config.assistant} has another vocabulary ({len(theirs):,} tokens) "
            f"than {config.target.path} ({len(ours):,}), so its drafts are no tokens of the "
            "target. Choose a smaller model of the same family."
        )
    return assistant.model


def _baseline(target: Target, config: EvaluateConfig, arguments: dict[str, Any]) -> Baseline:
    from train.decode import stop_ids_of

    stop_ids = stop_ids_of(target)

    def answer(ids: Tensor) -> dict[str, Any]:
        return generate(
            target,
            ids,
            max_new_tokens=config.max_new_tokens,
            stop_ids=stop_ids,
            **arguments,
        )

    return answer


@torch.inference_mode()
def generate(
    target: Target,
    ids: Tensor,
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    lookup_tokens: int | None = None,
    assistant: Any = None,
) -> dict[str, Any]:
    """Greedy `generate()` of Transformers. ids: [T]; the last two make it speculate."""
    ids = ids.to(target.device)[None]
    config = _greedy(target.model, max_new_tokens, stop_ids, lookup_tokens)
    with _watched(target.model, config) as forwards:
        start = time.perf_counter()
        output = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            assistant_model=assistant,
        )
        tokens = output[0, ids.shape[1] :].tolist()  # waits for the device
        seconds = time.perf_counter() - start
    return {"tokens": tokens, "seconds": {"total": seconds}, "forwards": len(forwards)}


def _greedy(
    model: Any, max_new_tokens: int, stop_ids: Collection[int], lookup_tokens: int | None
) -> Any:
    from transformers import GenerationConfig

    eos = sorted(stop_ids) or None
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=eos[0] if eos else 0,
        prompt_lookup_num_tokens=lookup_tokens,
        bos_token_id=model.config.get_text_config().bos_token_id,
    )


@contextmanager
def _watched(model: Any, config: Any) -> Iterator[list[None]]:
    """A list that grows with each forward of the model, whose own settings are put aside.

    `generate` takes what `config` leaves open from them: penalties, which plain decoding has not.
    """
    forwards: list[None] = []
    own = model.generation_config
    hook = model.register_forward_pre_hook(lambda *_: forwards.append(None))
    model.generation_config = config
    try:
        yield forwards
    finally:
        model.generation_config = own
        hook.remove()
