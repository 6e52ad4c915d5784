"""Compare an exported head in a real serving engine with our own decoding."""

import sys

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare, task
from train.config import CheckConfig


@hydra.main(config_name="check_export", **HYDRA)
@task
def main(cfg: DictConfig) -> None:
    config: CheckConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]

    from train.serve.check import check

    if not check(config)["passed"]:
        sys.exit(1)


if __name__ == "__main__":
    prepare("check_export", CheckConfig)
    main()
