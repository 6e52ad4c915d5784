"""Verify a feature cache, show what it holds, and repair it."""

import sys

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare, task
from data.config import InspectConfig


@hydra.main(config_name="inspect_cache", **HYDRA)
@task
def main(cfg: DictConfig) -> None:
    config: InspectConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]

    from data.cache.inspect import inspect, text

    found = inspect(config)
    print(text(found))
    if not found.is_whole:
        sys.exit(1)


if __name__ == "__main__":
    prepare("inspect_cache", InspectConfig)
    main()
