"""Measure our training step against the papers' and against its own matrix products."""

import json

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare, task
from train.config import TrainConfig


@hydra.main(config_name="bench_train", **HYDRA)
@task
def main(cfg: DictConfig) -> None:
    config: TrainConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]

    from train.bench.run import bench

    print(json.dumps(bench(config)))


if __name__ == "__main__":
    prepare("bench_train", TrainConfig)
    main()
