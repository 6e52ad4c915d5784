"""Train a draft head on a feature cache."""

import logging

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, is_sweep, job_folder, prepare, task
from train.config import TrainConfig

log = logging.getLogger(__name__)


@hydra.main(config_name="train_head", **HYDRA)
@task
def main(cfg: DictConfig) -> float:
    """Returns the held-out acceptance length, which a sweeper can maximise."""
    config: TrainConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    config.out = job_folder(config.out)

    from train.fit.loop import fit  # torch loads only after the config is known to be good
    from train.fit.step import NotFiniteError

    try:
        return fit(config)
    except NotFiniteError as error:
        if not is_sweep():
            raise
        log.error("error: %s\nThe sweep goes on without this run.", error)
        return 1.0  # the bonus token alone: as bad as a head can be


if __name__ == "__main__":
    prepare("train_head", TrainConfig)
    main()

    from data.processes import leave_launch  # here, so that --help need not load torch

    leave_launch()
