"""Measure our training step against the plain implementation of the papers'."""

import json
import logging
import random
import statistics
import time
from functools import partial
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare, task
from train.config import TrainConfig

log = logging.getLogger(__name__)
CONVERSATIONS = 4  # a batch, as in the papers' code


@hydra.main(config_name="bench_train", **HYDRA)
@task
def main(cfg: DictConfig) -> None:
    """Alternate batch by batch, so that a noisy machine is noisy to both."""
    config: TrainConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]

    import torch

    from data.batches import add_noise, pack
    from data.cache import FeatureCache
    from data.config import or_known
    from data.memory import keep_freed_pages
    from data.target import load_config, read_target_head
    from train.head import DraftHead, draft_config
    from train.loss import distillation_loss
    from train.plain import plain_loss
    from train.plan import split_cache

    keep_freed_pages(torch.device("cpu"))
    cache = FeatureCache(Path(config.features))
    target = or_known(config.target, cache.fingerprint)
    target_head = read_target_head(target)
    head = DraftHead(draft_config(load_config(target)))
    optimizer = torch.optim.AdamW(head.parameters(), lr=config.lr)
    training, _ = split_cache(cache, config)
    random.Random(config.seed).shuffle(training)  # the file has them sorted by chat
    plain = partial(plain_loss, l1_weight=1.0, ce_weight=config.loss.ce_weight)
    ours = partial(distillation_loss, l1_weight=1.0, ce_weight=config.loss.ce_weight)

    def step(name: str, sequences: list[int]) -> tuple[float, int]:
        """One update of the head. Returns the loss and its supervised positions."""
        batch = pack(cache, sequences)
        noisy = add_noise(batch, kind="paper", width=config.noise_width, seed=0, epoch=0)
        if name == "plain":
            loss = plain(head, target_head, batch, noisy)
        else:
            embeddings = target_head.embed(batch.next_ids).float()
            predicted = head(embeddings, noisy, batch.lengths)[batch.supervised]
            loss = ours(predicted, batch.target_features, target_head).loss
        (loss / len(batch.supervised)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach()), len(batch.supervised)

    rates: dict[str, list[float]] = {"ours": [], "plain": []}
    batches = [training[i : i + CONVERSATIONS] for i in range(0, len(training), CONVERSATIONS)]
    step("ours", batches[0])  # warm-up
    step("plain", batches[0])
    for number, sequences in enumerate(batches[: config.max_steps or 8]):
        # Each goes first every other time.
        for name in ("ours", "plain") if number % 2 else ("plain", "ours"):
            started = time.perf_counter()
            _, positions = step(name, sequences)
            rates[name].append(positions / (time.perf_counter() - started))
        log.info(
            "batch %d: ours %.0f, plain %.0f supervised tokens/s, ratio %.2f",
            number,
            rates["ours"][-1],
            rates["plain"][-1],
            rates["ours"][-1] / rates["plain"][-1],
        )
    ratios = [o / p for o, p in zip(rates["ours"], rates["plain"], strict=True)]
    result = {
        "vs_plain": round(statistics.median(ratios), 3),
        "ours_supervised_tokens_per_second": round(statistics.median(rates["ours"]), 1),
        "plain_supervised_tokens_per_second": round(statistics.median(rates["plain"]), 1),
        "batches": len(ratios),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    prepare("bench_train", TrainConfig)
    main()
