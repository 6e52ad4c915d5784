"""Draft heads that accept something: trained on the tiny target's own answers, or cheating."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from data.files import write_json
from data.targets.model import Target
from train.config import ExportConfig
from train.decode import plain_generate
from train.head import DraftHead, draft_config
from train.serve.export import export


def random_prompts(target: Target, lengths: list[int], *, seed: int = 0) -> list[Tensor]:
    """Prompts of the given numbers of tokens."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = target.head.weight.shape[0]
    return [torch.randint(3, vocab_size, (n,), generator=generator) for n in lengths]


def random_head(target: Target, *, seed: int = 0) -> DraftHead:
    torch.manual_seed(seed)
    return DraftHead(draft_config(target.model.config)).eval()


def trained_head(target: Target, prompts: list[Tensor], *, steps: int = 300) -> DraftHead:
    """A head fitted to the target's greedy answers to `prompts`: it accepts some, not all."""
    texts = [
        torch.cat(
            [ids, torch.tensor(plain_generate(target, ids, max_new_tokens=24, stop_ids=()).tokens)]
        )
        for ids in prompts
    ]
    features = [target.features(text[None])[0] for text in texts]
    inputs = torch.cat([f[:-1] for f in features])
    wanted = torch.cat([f[1:] for f in features])
    embeddings = target.head.embed(torch.cat([text[1:] for text in texts]))
    target_tokens = target.head.logits(wanted).argmax(-1)
    lengths = [len(text) - 1 for text in texts]

    head = random_head(target)
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    for _ in range(steps):
        predicted = head(embeddings, inputs, lengths)
        loss = torch.nn.functional.smooth_l1_loss(predicted, wanted)
        loss += 0.1 * torch.nn.functional.cross_entropy(
            target.head.logits(predicted), target_tokens
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return head.eval()


class CheatingHead(DraftHead):
    """Gives the real feature of each position of one known text, but for some it gets wrong."""

    def __init__(self, target: Target, text: Tensor, wrong: set[int] = frozenset()) -> None:
        super().__init__(draft_config(target.model.config))
        self.known = target.features(text[None])[0]  # [T, H]
        for position in wrong:
            self.known[position] = -self.known[position]

    def query_key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.positions = positions
        return super().query_key_value(x, positions)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """x: [1, W, H], the last W of the pairs whose keys were asked for"""
        return self.known[self.positions[:, -x.shape[1] :] + 1]


def export_tiny(head: DraftHead, target: Target, folder: Path, *, engine: str = "vllm") -> Path:
    """The folder that `export` writes of `head`, by way of a checkpoint."""
    checkpoint = folder / "run" / "steps" / "000001"
    checkpoint.mkdir(parents=True)
    save_file(head.state_dict(), checkpoint / "head.safetensors")
    head.config.save_pretrained(checkpoint)
    record = {
        "format_version": 1,
        "step": 1,
        "acceptance": None,
        "fingerprint": target.fingerprint,
        "cache": {},
        "settings": {},
    }
    write_json(checkpoint / "checkpoint.json", record)
    return export(ExportConfig(checkpoint=str(folder / "run"), engine=engine))
