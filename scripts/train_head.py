"""Train a draft head on a feature cache."""

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, job_folder, prepare, task
from train.config import TrainConfig


@hydra.main(config_name="train_head", **HYDRA)
@task
def main(cfg: DictConfig) -> float:
    """Returns the held-out acceptance length, which a sweeper can maximise."""
    config: TrainConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    config.out = job_folder(config.out)

    from train.loop import fit  # torch loads only after the config is known to be good

    return fit(config)


if __name__ == "__main__":
    prepare("train_head", TrainConfig)
    main()

    from data.processes import leave_launch  # here, so that --help need not load torch

    leave_launch()
