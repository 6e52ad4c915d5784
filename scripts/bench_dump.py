"""Measure the dump against the bare forward of the same batches."""

import json
import logging
import statistics
import time
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare, task
from data.config import DumpConfig

log = logging.getLogger(__name__)


@hydra.main(config_name="bench_dump", **HYDRA)
@task
def main(cfg: DictConfig) -> None:
    """Alternate shard by shard, so that a noisy machine is noisy to both."""
    config: DumpConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]

    from data.dump import do_shards, prepare_dump
    from data.plan import check_folder
    from data.shards import batches_of, padded
    from data.target import load_target

    out = Path(config.out)
    check_folder(out)
    out.mkdir(parents=True, exist_ok=True)
    plan, tokens = prepare_dump(config, out)
    target = load_target(config.target)

    def forward(index: int) -> None:
        for batch in batches_of(plan, tokens, index):
            input_ids, _ = padded(tokens, batch)
            features = target.features(input_ids.to(target.device))
        features[..., :1].cpu()  # waits for the device

    def dump(index: int) -> None:
        do_shards(target, out, plan, tokens, [index], advance=lambda _: None)

    rates: dict[str, list[float]] = {"forward": [], "dump": []}
    forward(0)  # warm-up
    for index, (first, last) in enumerate(plan.shards):
        num_tokens = int(tokens.offsets[last] - tokens.offsets[first])
        # Each goes first every other time.
        for run in (forward, dump) if index % 2 else (dump, forward):
            started = time.perf_counter()
            run(index)
            rates[run.__name__].append(num_tokens / (time.perf_counter() - started))
        log.info(
            "shard %d: %s tokens, forward %.1f tokens/s, dump %.1f tokens/s, ratio %.3f",
            index,
            f"{num_tokens:,}",
            rates["forward"][-1],
            rates["dump"][-1],
            rates["dump"][-1] / rates["forward"][-1],
        )
    ratios = [d / f for d, f in zip(rates["dump"], rates["forward"], strict=True)]
    result = {
        "vs_forward": round(statistics.median(ratios), 4),
        "dump_tokens_per_second": round(statistics.median(rates["dump"]), 1),
        "forward_tokens_per_second": round(statistics.median(rates["forward"]), 1),
        "num_tokens": plan.num_tokens,
        "num_shards": len(plan.shards),
        "device": str(target.device),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    prepare("bench_dump", DumpConfig)
    main()
