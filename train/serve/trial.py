"""Which reading of a head predicts the target: what no name, shape or key can tell.

The target answers a few questions; the head is run over its features in every reading that its
tensors allow: the halves of `fc` as they are and swapped, RoPE as its config has it and as the
target has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from data.chats.prompts import prompt_ids
from data.targets.model import Target
from train.decode import plain_generate
from train.head import DraftHead
from train.serve.case import Hit
from train.serve.import_head import StoredHead
from train.serve.target_facts import TargetFacts

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a lighthouse keeper.",
    "Explain step by step how to sort a list of numbers in Python.",
    "Give me three tips for a job interview.",
)
ANSWER = 32  # tokens of each
RIGHT_ANGLES = 0.99  # the loss with the right RoPE, as a share of that with another, at most
FEW = 0.02  # share of predicted tokens below which a head is of no use


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One way to read a head, and how well the head then predicts the target's answers."""

    swapped: bool  # the halves of fc
    target_rope: bool  # in place of its own
    agreement: float = 0.0  # share of positions at which it predicts the target's next token
    loss: float = 0.0  # smooth-L1 of the predicted features

    def __str__(self) -> str:
        return f"{100 * self.agreement:.1f} % of the target's tokens predicted"


@dataclass(frozen=True)
class Answered:
    """The target's answers, as the head sees them: T pairs of all documents, packed."""

    embeddings: Tensor  # [T, H]
    features: Tensor  # [T, H]
    wanted: Tensor  # [T, H]  the next feature
    tokens: Tensor  # [T]     the target's own choice after it
    lengths: list[int]
    scored: Tensor  # [T]     True in the answers


@torch.inference_mode()
def answer(target: Target, prompts: Sequence[list[int]]) -> Answered:
    """Let the target answer prompts, given as token ids."""
    texts, answers = [], []
    for prompt in prompts:
        ids = torch.tensor(prompt)
        said = plain_generate(target, ids, max_new_tokens=ANSWER, stop_ids=()).tokens
        texts.append(torch.cat([ids, torch.tensor(said)]).to(target.device))
        answers.append(torch.arange(len(texts[-1]) - 1) >= len(ids) - 1)
    features = [target.features(text[None])[0] for text in texts]
    wanted = torch.cat([f[1:] for f in features]).float()
    return Answered(
        embeddings=torch.cat([target.head.embed(text[1:]) for text in texts]).float(),
        features=torch.cat([f[:-1] for f in features]).float(),
        wanted=wanted,
        tokens=target.head.logits(wanted).argmax(-1),
        lengths=[len(text) - 1 for text in texts],
        scored=torch.cat(answers).to(target.device),
    )


@torch.inference_mode()
def readings(
    stored: StoredHead,
    facts: TargetFacts,
    target: Target,
    prompts: Sequence[list[int]] | None = None,
) -> list[Reading]:
    """Every reading of a head, measured. The first one is the head as it is.

    prompts: token ids of what the target is asked; None: QUESTIONS

    Raises ValueError if its tensors do not make a head.
    """
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    answered = answer(target, prompts or [prompt_ids(target.tokenizer, one) for one in asked])
    ways = [Reading(swapped=s, target_rope=r) for r in (False, True) for s in (False, True)]
    measured = []
    for way in ways:
        head = _build(stored, facts, way).to(target.device)
        predicted = head(answered.embeddings, answered.features, answered.lengths)
        predicted, wanted = predicted[answered.scored], answered.wanted[answered.scored]
        chosen = target.head.logits(predicted).argmax(-1)
        agreement = float((chosen == answered.tokens[answered.scored]).float().mean())
        loss = float(F.smooth_l1_loss(predicted, wanted))
        measured.append(replace(way, agreement=agreement, loss=loss))
    return measured


def _build(stored: StoredHead, facts: TargetFacts, way: Reading) -> DraftHead:
    config = LlamaConfig.from_dict(stored.config.to_dict())
    if way.target_rope:
        config.rope_parameters = facts.head.rope_parameters
        config.max_position_embeddings = facts.head.max_position_embeddings
    config.fc_bias = "fc.bias" in stored.tensors
    head = DraftHead(config)
    tensors = {name: stored.tensors.get(name) for name in head.state_dict()}
    wrong = [
        name
        for name, wanted in head.state_dict().items()
        if tensors[name] is None or tensors[name].shape != wanted.shape  # type: ignore[union-attr]
    ]
    if wrong:
        raise ValueError(f"no head can be built: {', '.join(wrong)} is missing or of another shape")
    if way.swapped:
        tensors["fc.weight"] = swap_halves(tensors["fc.weight"])  # type: ignore[arg-type]
    head.load_state_dict(tensors)
    return head.eval()


def swap_halves(weight: Tensor) -> Tensor:
    """fc.weight whose two input halves change places: [H, 2H] -> [H, 2H]."""
    return weight.roll(weight.shape[1] // 2, dims=1).contiguous()


def best_reading(measured: list[Reading]) -> Reading:
    """The reading that predicts clearly more than the head as it is; else that one.

    measured: own and target's RoPE of one order of the halves, in turn
    """
    straight, swapped = (
        max((one for one in measured if one.swapped == way), key=lambda one: one.agreement)
        for way in (False, True)
    )
    # Swapped halves leave next to nothing, so that no close call is a swap.
    swap = swapped.agreement > 2 * straight.agreement + FEW and swapped.loss < straight.loss
    own, targets = (one for one in measured if one.swapped == swap)
    # Other angles change little over short texts, but they do so surely.
    other = targets.agreement >= own.agreement and targets.loss < RIGHT_ANGLES * own.loss
    return targets if other else own


def trial_hits(measured: list[Reading]) -> list[Hit]:
    """What the readings say against the head as it is."""
    as_it_is, best = measured[0], best_reading(measured)
    hits = []
    if best.swapped:
        hits.append(
            Hit(rule="fc-halves", subject="fc.weight", found=f"{as_it_is}; swapped, {best}")
        )
    if best.target_rope:
        own = next(one for one in measured if one.swapped == best.swapped)
        found = f"loss {own.loss:.3f}, with the target's RoPE {best.loss:.3f}"
        hits.append(Hit(rule="rope-guess", subject="rope", found=found))
    if best.agreement < FEW:
        hits.append(Hit(rule="predicts-nothing", subject="the head", found=f"{best}"))
    return hits
