"""Train a draft head on a feature cache."""

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare
from train.config import TrainConfig


@hydra.main(config_name="train_head", **HYDRA)
def main(cfg: DictConfig) -> float:
    config: TrainConfig = OmegaConf.to_object(cfg)
    print(config)
    return 0.0


if __name__ == "__main__":
    prepare("train_head", TrainConfig)
    main()
